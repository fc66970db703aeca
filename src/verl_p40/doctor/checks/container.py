"""Docker: the engine, the NVIDIA runtime, Compose, our image; and the container that we may be in."""

from __future__ import annotations

import re
from typing import Any

from verl_p40.doctor import cards as smi
from verl_p40.doctor.checks.nvidia import numbers
from verl_p40.doctor.machine import Machine, Output
from verl_p40.doctor.model import Outcome, check, failure, na, note, ok, warning
from verl_p40.doctor.where import in_container
from verl_p40.errors import VerlP40Error

MESSAGE = 'could not select device driver "nvidia" with capabilities: [[gpu]]'
"""The engine's words where no NVIDIA runtime is known, for Compose (seen with engine 20.10);
``docker run --gpus all`` names the driver "" instead."""

TOOLKIT = (
    "sudo apt-get install -y nvidia-container-toolkit   # its repository first: "
    "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"
)
CONFIGURE = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"

OLDEST_ENGINE = "19.03"
"""The first with ``--gpus`` (Docker Engine 19.03 release notes)."""
OLDEST_COMPOSE = "2.24.4"
"""docker-compose.yml needs it (``env_file: required``, ``!reset``): docs/docker.md."""


def info(machine: Machine) -> Output | None:
    """``docker info`` once, for every check here."""
    return machine.command("docker", "info", limit=15)


def field(text: str, name: str) -> str:
    """The value of a line of ``docker info``."""
    found = re.search(rf"^\s*{re.escape(name)}: *(.*?)\s*$", text, re.MULTILINE)
    return found.group(1) if found else ""


def apart(machine: Machine) -> bool:
    """Whether we are in a container that no engine answers in."""
    if not in_container(machine):
        return False
    said = info(machine)
    return said is None or not field(said.text, "Server Version")


@check("docker", "Docker Engine", limit=20)
def docker(machine: Machine) -> Outcome:
    """Reachable, and new enough for ``--gpus``."""
    if apart(machine):
        return na("inside a container: ask the host")
    said = info(machine)
    if said is None and not machine.told("docker info"):
        return na("not recorded")
    if said is None:
        if machine.live and (problem := _by_socket()):
            return na(
                f"no docker command here, and {problem}", "https://docs.docker.com/engine/install"
            )
        return na(
            "Docker is not installed: only the image needs it",
            "https://docs.docker.com/engine/install",
        )
    version = field(said.text, "Server Version")
    if not version and field(said.text, "Runtimes"):
        return na("its version is not told")
    if not version:
        return _unreachable(said)
    if numbers(version)[:2] < numbers(OLDEST_ENGINE):
        return failure(
            f"{version} has no --gpus (from {OLDEST_ENGINE} on)",
            "https://docs.docker.com/engine/install",
        )
    cgroup = field(said.text, "Cgroup Version") or "?"
    rootless = "rootless" in said.text
    facts: dict[str, Any] = {"version": version, "cgroup": cgroup}
    system = field(said.text, "Operating System")
    if "Docker Desktop" in system:
        return note(
            f"{version} is Docker Desktop, whose containers run in a virtual machine: GPUs only "
            "under Windows with WSL 2",
            "on Linux: https://docs.docker.com/engine/install",
            **facts,
        )
    return ok(
        f"{version}{', rootless' if rootless else ''}, cgroup v{cgroup}, "
        f"{field(said.text, 'Storage Driver') or 'unknown storage'}",
        **facts,
    )


def _by_socket() -> str:
    """What the engine's own client says; empty when it answers."""
    from verl_p40.image import engine

    try:
        with engine.connect():
            return ""
    except VerlP40Error as error:
        return error.message


def _unreachable(said: Output) -> Outcome:
    """A warning: without Docker, training on the host itself works."""
    if "permission denied" in said.text.lower():
        return warning(
            "the engine may not be used by this user",
            "sudo usermod -aG docker $USER && newgrp docker   # the group may do what root may",
        )
    if said.timed_out:
        return warning("the engine does not answer", "sudo systemctl restart docker")
    last = said.text.strip().splitlines()
    return warning(
        f"the engine does not answer: {last[-1][:160] if last else 'no word from it'}",
        "sudo systemctl enable --now docker",
    )


@check("nvidia-runtime", "NVIDIA runtime of Docker", limit=30)
def nvidia_runtime(machine: Machine) -> Outcome:
    """Docker hands out GPUs through the toolkit's runtime (or its CDI files)."""
    if apart(machine):
        return _inside(machine)
    said = info(machine)
    if said is None or not field(said.text, "Runtimes"):
        return na("no engine to ask: see docker")
    toolkit = _toolkit(machine)
    runtimes = field(said.text, "Runtimes").split()
    devices = bool(smi.cards(machine) or smi.pci(machine))
    cdi = re.search(r"cdi: nvidia\.com/gpu", said.text)
    if "nvidia" in runtimes or cdi:
        default = field(said.text, "Default Runtime")
        how = "registered" if "nvidia" in runtimes else "by CDI"
        return ok(f"{how}{', the default' if default == 'nvidia' else ''}{toolkit}")
    if not devices:
        return na("not registered, and no NVIDIA card either")
    why = f"a container that asks for a GPU ends with: {MESSAGE}"
    if toolkit:
        elsewhere = ""
        config = machine.text("/etc/docker/daemon.json") or ""
        if '"nvidia"' in config:
            elsewhere = (
                "; /etc/docker/daemon.json names it, so this engine reads another file "
                "(snap, rootless, Desktop) or was not restarted"
            )
        return failure(f"not registered: {why}{elsewhere}", CONFIGURE, *_other_engine(elsewhere))
    return failure(f"nvidia-container-toolkit is not installed: {why}", TOOLKIT, CONFIGURE)


def _other_engine(elsewhere: str) -> tuple[str, ...]:
    if not elsewhere:
        return ()
    return (
        "which engine is it? docker context ls; snap list docker; docker info --format "
        "'{{.DockerRootDir}}' (snap: sudo snap remove docker, then Docker's own packages)",
    )


def _toolkit(machine: Machine) -> str:
    """``, toolkit 1.17.6``, as one of its programs says; empty when it is not installed."""
    for words in (("nvidia-ctk", "--version"), ("nvidia-container-runtime", "--version")):
        said = machine.command(*words)
        if said is not None:
            found = re.search(r"version (\d[\w.-]*)", said.text)
            return f", toolkit {found.group(1)}" if found else ", toolkit installed"
    return ""


def _inside(machine: Machine) -> Outcome:
    """In a container: whether the runtime has brought the driver in."""
    if smi.cards(machine) or machine.text("/proc/driver/nvidia/version") is not None:
        return ok("this container has the host's driver")
    wanted = machine.variable("NVIDIA_VISIBLE_DEVICES")
    if wanted in (None, "", "void", "none"):
        return na("this container was not given a GPU")
    return failure(
        f"NVIDIA_VISIBLE_DEVICES={wanted}, but no driver came in: started without the runtime",
        "docker run --gpus all ...   # or docker compose up train",
    )


@check("compose", "Docker Compose", limit=15)
def compose(machine: Machine) -> Outcome:
    if apart(machine):
        return na("inside a container: ask the host")
    said = machine.command("docker", "compose", "version")
    if said is None:
        told = machine.told("docker compose version")
        return na("no docker command" if told else "not recorded")
    version = re.search(r"v?(\d+\.\d+\.\d+)", said.text)
    fix = "sudo apt-get install docker-compose-plugin   # of Docker's repository"
    if said.code != 0 or version is None:
        return warning("docker compose is not installed", fix)
    if numbers(version.group(1)) < numbers(OLDEST_COMPOSE):
        return warning(
            f"{version.group(1)} cannot read docker-compose.yml ({OLDEST_COMPOSE} or newer)", fix
        )
    return ok(version.group(1))


@check("image", "verl-p40's image", limit=30, replayable=False)
def image(machine: Machine) -> Outcome:
    """There, from this version, with this version's patch queue."""
    from verl_p40.image import engine, names
    from verl_p40.patches.queue import load_queue

    if apart(machine):
        return na("inside a container: ask the host")
    name = names.default("train", "cu118" if smi.cards(machine) else "cpu")
    build = "verl-p40 image build   # or: docker compose build train"
    try:
        with engine.connect() as client:
            from docker.errors import ImageNotFound

            try:
                found = client.images.get(name)
            except ImageNotFound:
                return note(f"{name} is not here (only Docker needs it)", build)
            digests = [d.partition("@")[2][:19] for d in found.attrs.get("RepoDigests") or []]
            identity = digests[0] if digests else f"built here, {found.short_id}"
            labels = found.labels or {}
    except VerlP40Error as error:
        return na(f"no engine to ask: {error.message}")
    stated = next((v for k, v in labels.items() if k.endswith("patches-digest")), "")
    if stated and stated != load_queue().digest:
        return warning(f"{name} ({identity}) carries another version's patches", build)
    return ok(f"{name}: {identity}", details=(f"created {found.attrs.get('Created', '?')}",))


@check("folders", "Folders that are written", limit=20, replayable=False)
def folders(machine: Machine) -> Outcome:
    """In a container the mounted ones, by their variables; elsewhere runs, data, models, caches."""
    from pathlib import Path

    from verl_p40.data.models import hub_cache
    from verl_p40.services import mounts
    from verl_p40.services.mounts import Mount
    from verl_p40.stack import paths

    places = (
        (Mount("VERL_P40_RUNS", "runs", "VERL_P40_RUNS"), paths.runs_home()),
        (Mount("HF_HOME", "the Hugging Face cache", "VERL_P40_CACHE"), hub_cache()),
        (Mount("VERL_P40_HOME", "downloads", "VERL_P40_CACHE"), paths.cache_home()),
    )
    for mount, folder in places:
        there = next((p for p in (folder, *folder.parents) if p.is_dir()), Path("/"))
        refused = mounts.refusal(there)
        if refused is not None:
            error = mounts.explain(mount, refused)
            return failure(error.message, error.fix)
    return ok(
        f"runs, downloads and the Hugging Face cache can be written ({paths.runs_home().name}/ "
        "and caches)"
    )
