"""What compiles vLLM: CUDA's compiler and the host's, and how many may run at a time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_p40.errors import MachineError
from verl_p40.stack import pins

JOB_BYTES = 3 * 2**30
"""Memory of the largest compilation, from above: nvcc 11.8's cicc on vLLM's attention, 2.9 GB."""
NEWEST_GCC = 11
"""CUDA 11.8's ``crt/host_config.h`` stops at a newer one."""
OLDEST_GCC = 9
"""torch 2.6's headers are C++17; PyTorch's build instructions ask for gcc 9.4."""
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Toolchain:
    """The compilers of a build."""

    cuda_home: Path
    cuda: str
    """As nvcc says it: ``11.8``."""
    host: Path
    """g++, for nvcc's host code and for C++ sources."""
    gcc: int
    """Its major version."""

    @property
    def cc(self) -> Path:
        """The C compiler beside it, which CMake asks for."""
        beside = self.host.with_name(self.host.name.replace("g++", "gcc"))
        return beside if beside.exists() else self.host


def find_toolchain(environ: Mapping[str, str] | None = None) -> Toolchain:
    """The CUDA toolkit of the pinned version and a g++ that it takes.

    ``CUDA_HOME`` names the toolkit and ``CUDAHOSTCXX`` the host compiler; without them nvcc is
    looked for on PATH and in /usr/local, and g++-11, g++-10, g++-9 and g++ on PATH.

    Raises:
        MachineError: there is none, or it is of another version.
    """
    environ = os.environ if environ is None else environ
    wanted = pins.load().cuda.version
    home = _cuda_home(environ, wanted)
    host = _host_compiler(environ)
    gcc = _gcc_major(host)
    if not OLDEST_GCC <= gcc <= NEWEST_GCC:
        raise MachineError(
            f"{host} is gcc {gcc}: nvcc {wanted} takes none newer than {NEWEST_GCC}, "
            f"and torch none older than {OLDEST_GCC}",
            fix=f"install g++-{NEWEST_GCC}, or name another: CUDAHOSTCXX=/usr/bin/g++-{NEWEST_GCC}",
        )
    return Toolchain(home, wanted, host, gcc)


def _cuda_home(environ: Mapping[str, str], wanted: str) -> Path:
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if named:
        found = _nvcc_version(Path(named) / "bin" / "nvcc")
        if found != wanted:
            what = f"is CUDA {found}" if found else "has no bin/nvcc that works"
            raise MachineError(
                f"CUDA_HOME={named} {what}; vLLM is built with CUDA {wanted}, as torch is",
                fix=f"CUDA_HOME=/usr/local/cuda-{wanted}, or build the Dockerfile's stage: "
                "docs/vllm.md",
            )
        return Path(named)
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    seen = []
    for nvcc in (
        Path(f"/usr/local/cuda-{wanted}/bin/nvcc"),
        *([Path(on_path)] if on_path else []),
        Path("/usr/local/cuda/bin/nvcc"),
    ):
        found = _nvcc_version(nvcc)
        if found == wanted:
            return nvcc.parent.parent
        if found:
            seen.append(f"{nvcc} is CUDA {found}")
    raise MachineError(
        f"no CUDA {wanted} toolkit" + (f" ({', '.join(dict.fromkeys(seen))})" if seen else ""),
        fix=f"install it and set CUDA_HOME, or build the Dockerfile's stage: docs/vllm.md "
        f"(Debian 12: apt install nvidia-cuda-toolkit g++-{NEWEST_GCC}, from non-free)",
    )


def _nvcc_version(nvcc: Path) -> str:
    """``11.8``; empty for what is no nvcc."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"release (\d+\.\d+)", said.stdout)
    return found.group(1) if found else ""


def _host_compiler(environ: Mapping[str, str]) -> Path:
    named = environ.get("CUDAHOSTCXX")
    names = [named] if named else [f"g++-{v}" for v in range(NEWEST_GCC, OLDEST_GCC - 1, -1)]
    for name in [*names, *([] if named else ["g++"])]:
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return Path(found)
    raise MachineError(
        f"CUDAHOSTCXX={named} is not there" if named else "there is no g++",
        fix=f"install g++-{NEWEST_GCC}",
    )


def _gcc_major(host: Path) -> int:
    """The compiler's own word; 0 for what does not answer like gcc."""
    try:
        said = subprocess.run([host, "-dumpversion"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.match(r"(\d+)", said.stdout)
    return int(found.group(1)) if found else 0


def memory_available() -> int:
    """Bytes that compilers may take: what is free, within the container's limit."""
    free = psutil.virtual_memory().available
    for path in _CGROUP_LIMITS:
        try:
            free = min(free, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return free


def count_jobs(asked: int | None, memory: int, cores: int) -> int:
    """How many compilers run at a time: a core and 3 GiB each.

    Args:
        asked: the user's number; it is not cut down to the cores, but to the memory.
        memory: bytes available.
        cores: processors this process may use.

    Raises:
        MachineError: there is not memory for one, or not for as many as asked for.
    """
    room = memory // JOB_BYTES
    wanted = asked if asked is not None else 1
    if room < wanted:
        each = JOB_BYTES / 2**30
        raise MachineError(
            f"{wanted} compilers need {wanted * each:.0f} GiB of memory, "
            f"{memory / 2**30:.1f} GiB are available",
            fix=f"--jobs {room}" if room else "stop other programs, or add swap and memory",
        )
    return asked if asked is not None else max(1, min(cores, room))
