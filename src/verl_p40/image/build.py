"""Build an image of the clone's Dockerfile, with BuildKit.

docker-py speaks to the engine's older builder only, which knows neither secrets nor cache mounts,
so the docker command builds; its progress goes to the terminal as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl_p40.errors import DiskError, MachineError, NetworkError, UsageError, VerlP40Error
from verl_p40.image import contents, names
from verl_p40.image.engine import asking
from verl_p40.image.names import Target
from verl_p40.image.problems import explain
from verl_p40.patches.queue import load_queue
from verl_p40.stack import lockfile, paths, pins
from verl_p40.stack.clone import revision
from verl_p40.stack.pins import FlavorName

if TYPE_CHECKING:
    from docker import DockerClient

CA_VARIABLES = (
    "VERL_P40_CA_FILE",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
)
TAIL = 60
"""Lines of a failed build that are searched for the reason."""
_STEP = re.compile(r"^#\d+ ([\d.]+ )?(ERROR: )?")
FULL = 64 * 2**20
"""Free bytes below which a failed build is put down to the full disk."""


@dataclass(frozen=True)
class Request:
    """What to build; empty strings leave the Dockerfile's defaults."""

    target: Target = "train"
    flavor: FlavorName = "cu118"
    tags: Sequence[str] = ()
    base_image: str = ""
    pypi_index: str = ""
    torch_index: str = ""
    hf_endpoint: str = ""
    runtime_packages: str | None = None
    """None leaves the Dockerfile's; empty installs none."""
    vllm: bool | None = None
    """Whether vLLM is in it; None leaves it to the flavor."""
    vllm_base_image: str = ""
    triton: str = ""
    ca: Path | None = None
    build_args: Sequence[str] = ()
    """``NAME=value``, or ``NAME`` to take the environment's (a proxy)."""
    network: str = ""
    no_cache: bool = False
    pull: bool = False
    context: Path | None = None


@dataclass(frozen=True)
class Plan:
    """A build that is ready to run."""

    command: list[str]
    environ: dict[str, str] = field(repr=False)
    context: Path
    tags: list[str]


@dataclass(frozen=True)
class Built:
    """An image that was built."""

    tags: list[str]
    id: str
    size: int
    """Bytes, unpacked."""
    layers: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 1)}


def plan(request: Request) -> Plan:
    """Everything that can be wrong before the build starts, and the command.

    Raises:
        MachineError: no docker command, no BuildKit.
        UsageError: no Dockerfile, no CA file, a bad name, or a password in an address.
    """
    context = find_context(request.context)
    tags = list(request.tags) or [names.default(request.target, request.flavor)]
    for tag in tags:
        if names.parse(tag).digest:
            raise UsageError(f"{tag} names a digest; a build gets a tag", fix="--tag name:tag")
    builder, environ = _builder()
    command = [*builder, "--target", request.target]
    for tag in tags:
        command += ["--tag", tag]
    for name, value in _arguments(request, context).items():
        command += ["--build-arg", f"{name}={value}"]
    for argument in request.build_args:
        name = argument.partition("=")[0]
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--build-arg {argument}: `{name}` is not a name", fix="NAME=value")
        _no_password(f"--build-arg {name}", argument.partition("=")[2])
        command += ["--build-arg", argument]
    if request.target == "train":
        lock = context / "locks" / pins.load().flavor[request.flavor].lock
        command += ["--label", f"{contents.OURS}lock-digest={lockfile.digest(lock)}"]
    ca = _ca(request.ca)
    if ca is not None:
        command += ["--secret", f"id=ca,src={ca}"]
    if request.network:
        command += ["--network", request.network]
    command += ["--no-cache"] if request.no_cache else []
    command += ["--pull"] if request.pull else []
    if not sys.stderr.isatty():
        command += ["--progress", "plain"]
    return Plan([*command, str(context)], environ, context, tags)


def run(client: DockerClient, plan: Plan) -> Built:
    """Build. The builder's progress goes to standard error.

    Raises:
        DiskError, NetworkError, MachineError: by the reason that the builder gave.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verl-p40-build-") as scratch:
        # On a terminal the builder has to draw by itself, and only its exit code comes back.
        log = None if sys.stderr.isatty() else Path(scratch, "log")
        process = subprocess.Popen(
            plan.command,
            env=plan.environ,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if log is None else subprocess.PIPE,
            stderr=None if log is None else subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            tail = _pass_on(process.stdout) if process.stdout is not None else []
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code != 0:
        raise _failure(client, code, tail)
    seconds = time.monotonic() - started
    with asking(plan.tags[0]):
        found = client.api.inspect_image(plan.tags[0])
    return Built(
        plan.tags, found["Id"], int(found["Size"]), len(found["RootFS"].get("Layers", ())), seconds
    )


def find_context(named: Path | None) -> Path:
    """The folder to build: ``named``, else the clone that this package runs from or is called in.

    Raises:
        UsageError: there is no Dockerfile of verl-p40.
    """
    if named is not None:
        if not (named / "Dockerfile").is_file():
            raise UsageError(f"no Dockerfile in {named}", fix="name a clone of the repository")
        return named.resolve()
    for folder in (paths.package_dir().parent.parent, Path.cwd()):
        if (folder / "Dockerfile").is_file() and (folder / "src" / "verl_p40").is_dir():
            return folder.resolve()
    raise UsageError(
        "no Dockerfile: this verl-p40 is installed without its repository",
        fix="clone the repository and build there (or name it: --context DIR), or pull the "
        "image: verl-p40 image pull",
    )


def _arguments(request: Request, context: Path) -> dict[str, str]:
    for name, value in (
        ("--pypi-index", request.pypi_index),
        ("--torch-index", request.torch_index),
        ("--hf-endpoint", request.hf_endpoint),
    ):
        _no_password(name, value)
        if value and urlsplit(value).scheme not in {"http", "https"}:
            raise UsageError(f"{name} {value} is not an address", fix="https://...")
    given = {
        "FLAVOR": request.flavor,
        "VERSION": version(context),
        "REVISION": revision(context) or "",
        "PATCHES_DIGEST": load_queue(context / "patches" / "verl").digest,
        "BASE_IMAGE": request.base_image,
        "PYPI_INDEX": request.pypi_index,
        "TORCH_INDEX": request.torch_index,
        "HF_ENDPOINT": request.hf_endpoint,
        "VLLM": "" if request.vllm is None else str(int(request.vllm)),
        "VLLM_BASE_IMAGE": request.vllm_base_image,
        "TRITON": request.triton,
    }
    found = {name: value for name, value in given.items() if value}
    if request.runtime_packages is not None:
        found["RUNTIME_PACKAGES"] = request.runtime_packages
    return found


def _no_password(option: str, value: str) -> None:
    """Build arguments stay readable in the image's history for everyone who pulls it."""
    parts = urlsplit(value) if "://" in value else None
    if parts is not None and (parts.username or parts.password):
        raise UsageError(
            f"{option}: the address holds a user or password, and the image's history would "
            "show it to everyone",
            fix="use a mirror without a login, or a local proxy that adds it",
        )


def version(root: Path) -> str:
    """The version of verl-p40 that a clone holds: not always that of this command.

    Raises:
        UsageError: it says none.
    """
    path = root / "src" / "verl_p40" / "__init__.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise UsageError(f"{root} is not a clone of verl-p40", fix="name one: --context DIR")
    return found.group(1)


def _ca(named: Path | None) -> Path | None:
    """The certificate bundle that the build trusts besides the base image's."""
    if named is not None:
        if not named.is_file():
            raise UsageError(f"--ca {named} is not a file", fix="a bundle of PEM certificates")
        return named.resolve()
    for variable in CA_VARIABLES:
        value = os.environ.get(variable)
        if value and Path(value).is_file():
            return Path(value).resolve()
    return None


def _builder() -> tuple[list[str], dict[str, str]]:
    """The docker command that builds with BuildKit, and its environment."""
    if shutil.which("docker") is None:
        raise MachineError(
            "the docker command is missing; a build needs it and its buildx plugin",
            fix="install docker-ce-cli and docker-buildx-plugin (Debian, Ubuntu: docker-buildx)",
        )
    environ = dict(os.environ)
    answer = subprocess.run(["docker", "buildx", "version"], capture_output=True, text=True)
    if answer.returncode == 0:
        # --load: also builders that run in a container of their own put the result here.
        return ["docker", "buildx", "build", "--load"], environ
    # Without buildx, only clients before 23.0 have BuildKit built in.
    version = subprocess.run(["docker", "--version"], capture_output=True, text=True).stdout
    major = re.search(r"version (\d+)\.", version)
    if major is None or int(major.group(1)) >= 23:
        raise MachineError(
            "docker has no buildx plugin, so no BuildKit",
            fix="install docker-buildx-plugin (Debian, Ubuntu: docker-buildx)",
        )
    return ["docker", "build"], {**environ, "DOCKER_BUILDKIT": "1"}


def _pass_on(lines: IO[str]) -> list[str]:
    """Copy the builder's output to standard error as it comes; its last lines."""
    tail: deque[str] = deque(maxlen=TAIL)
    for line in lines:
        sys.stderr.write(line)
        sys.stderr.flush()
        tail.append(line)
    return list(tail)


def _failure(client: DockerClient, code: int, tail: Sequence[str]) -> VerlP40Error:
    """The reason of a failed build, where a line of it is one we know."""
    full = next((line for line in tail if "no space left on device" in line), "")
    if full:
        return explain(_STEP.sub("", full))
    root = ""
    try:
        with asking():
            root = str(client.info().get("DockerRootDir", ""))
        free = shutil.disk_usage(root).free if root and Path(root).is_dir() else FULL
    except (OSError, VerlP40Error):
        free = FULL
    if free < FULL:
        return DiskError(
            f"the build failed, and the engine's disk is full ({root})",
            fix="docker system df shows what takes it; docker builder prune frees build caches",
        )
    last = next((line.strip() for line in reversed(tail) if line.startswith("ERROR")), "")
    if "did not complete successfully" not in last:
        known = explain(last, "the base image")
        if isinstance(known, NetworkError):
            return known
    return MachineError(
        f"the build failed (exit code {code})" + (f": {last}" if last else ""),
        fix="the lines above say at which step; building again starts there",
    )
