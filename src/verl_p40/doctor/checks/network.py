"""The model hub or its mirror: to be reached, or not needed."""

from __future__ import annotations

from urllib.parse import urlsplit

from verl_p40.data import hub, models
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, check, na, note, ok, warning
from verl_p40.train import catalog

_YES = {"1", "on", "yes", "true"}
"""What huggingface_hub takes for set (its ``constants._is_true``)."""


def offline(machine: Machine) -> str:
    """The variable that forbids the network; empty when none does."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        if (machine.variable(name) or "").lower() in _YES:
            return name
    return ""


def default_model(machine: Machine) -> str:
    """The model that is asked about: the user's, else the main preset's."""
    return machine.subject.model or catalog.load("p40-ppo").about.model


@check("hub", "Model hub", limit=20, fast=False)
def reach_hub(machine: Machine) -> Outcome:
    """DNS and TCP to ``HF_ENDPOINT`` (or the proxy before it)."""
    endpoint = machine.variable("HF_ENDPOINT") or hub.endpoint()
    host, port = _address(endpoint)
    if variable := offline(machine):
        return note(f"{variable} is set: nothing is downloaded", f"unset {variable}")
    if not host:
        return warning(f"HF_ENDPOINT={endpoint} is no address", "unset HF_ENDPOINT")
    proxy = machine.variable("HTTPS_PROXY") or machine.variable("https_proxy") or ""
    through = ""
    target = (host, port)
    if proxy and host not in _direct(machine):
        target = _address(proxy if "://" in proxy else f"http://{proxy}")
        through = f" through the proxy {target[0]}"
    problem = machine.reach(*target)
    if problem is None:
        return na("nobody tried")
    if not problem:
        return ok(f"{host} answers{through}")
    told = f"{host}{through}: {problem}"
    if machine.live and models.find(default_model(machine)) is not None:
        return note(f"{told}; {default_model(machine)} is here already", "export HF_HUB_OFFLINE=1")
    return warning(
        f"{told}: models and GSM8K cannot be downloaded",
        "export HF_ENDPOINT=https://hf-mirror.com   # or another mirror",
        "without a network: copy the model's files to models/OWNER/NAME, the data with "
        "`verl-p40 data gsm8k --local FOLDER`",
    )


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", 0


def _direct(machine: Machine) -> set[str]:
    value = machine.variable("NO_PROXY") or machine.variable("no_proxy") or ""
    return {part.strip() for part in value.split(",")}


@check("hf-cache", "Model files", limit=20, replayable=False)
def hf_cache(machine: Machine) -> Outcome:
    """Whether the model is here, whole, and where downloads go."""
    name = default_model(machine)
    if not models.is_hub_name(name):
        from pathlib import Path

        lacks = models.missing(Path(name).expanduser())
        if lacks is None:
            return ok(f"{name} is whole")
        return warning(f"{name} has no {lacks}", f"ls -l {name}")
    cache = models.hub_cache()
    found = models.find(name)
    if found is not None:
        return ok(f"{name} is here ({found.source})")
    space = machine.space(str(cache))
    free = "" if space is None else f", {space.free / 1e9:.0f} GB free there"
    if variable := offline(machine):
        return warning(
            f"{name} is not here, and {variable} forbids to download it",
            f"unset {variable}   # or copy it to models/{name}",
        )
    return ok(f"{name} is not here yet: the first run downloads it{free}")
