"""nvcc, where it is on this machine, and what it makes of a source for ``compute_61``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_p40.errors import MachineError
from verl_p40.kernels.compile_child import read_report
from verl_p40.numerics.manifest import ARCH

_FIX = "install CUDA 11.8 (docs/vllm.md says how on Debian) and set CUDA_HOME"
_DEFINES = (
    *("ENABLE_FP8", "TORCH_EXTENSION_NAME=_C", "_GLIBCXX_USE_CXX11_ABI=0"),
    *("__CUDA_NO_HALF_OPERATORS__", "__CUDA_NO_HALF_CONVERSIONS__"),
    *("__CUDA_NO_HALF2_OPERATORS__", "__CUDA_NO_BFLOAT16_CONVERSIONS__"),
)
"""vLLM's (cmake/utils.cmake) and torch's own for CUDA sources."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler that still knows ``compute_61``: any before 13.0.

    Attributes:
        version: such as ``11.8.89``.
        host: the C++ compiler that it is given; empty to let it choose.
    """

    path: Path
    version: str
    host: str

    def ptx(self, source: Path, output: Path, include: Sequence[Path], csrc: Path) -> None:
        """Compile to PTX with the flags of vLLM's build.

        Args:
            include: of torch, searched as system headers.
            csrc: vLLM's, searched first.

        Raises:
            MachineError: the compiler refuses; its first error is given.
        """
        command = [
            str(self.path), "-ptx", str(source), "-o", str(output), f"-arch=compute_{ARCH}",
            "-std=c++17", "-O2", "--expt-relaxed-constexpr", "--expt-extended-lambda",
            *(f"-D{name}" for name in _DEFINES), f"-I{csrc}",
        ]  # fmt: skip
        for folder in include:
            command += ["-isystem", str(folder)]
        if self.host:
            command += ["-ccbin", self.host]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            said = (errors or done.stderr.splitlines() or ["no output"])[0]
            raise MachineError(f"nvcc {self.version} cannot compile {source.name}: {said[:300]}")

    def figures(self, ptx: Path) -> dict[str, dict[str, int]]:
        """By entry, what ptxas says of it for sm_61: registers, bytes of spills and static shared.

        Raises:
            MachineError: ptxas refuses it.
        """
        done = subprocess.run(
            [self.path.with_name("ptxas"), "-v", f"--gpu-name=sm_{ARCH}", ptx, "-o", os.devnull],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MachineError(f"ptxas cannot assemble {ptx.name}: {done.stderr[:300]}")
        return read_figures(done.stdout + done.stderr)


def read_figures(report: str) -> dict[str, dict[str, int]]:
    """By entry, the figures in what ``ptxas -v`` printed; ``shared`` is the static part, bytes."""
    found = {}
    for part in report.split("Compiling entry function '")[1:]:
        shared = re.search(r"(\d+) bytes smem", part)
        found[part.partition("'")[0]] = {
            **read_report(part),
            "shared": int(shared[1]) if shared else 0,
        }
    return found


def find_nvcc() -> Nvcc:
    """The compiler of ``CUDA_HOME``, else the one on PATH.

    Raises:
        MachineError: there is none, or it has no ``compute_61`` any more.
    """
    home = os.environ.get("CUDA_HOME")
    name = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc")
    if name is None or not Path(name).is_file():
        raise MachineError(f"no nvcc {f'in CUDA_HOME={home}' if home else 'on PATH'}", fix=_FIX)
    try:
        said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise MachineError(f"cannot run {name}: {error.strerror or error}", fix=_FIX) from error
    match = re.search(r"release [\d.]+, V(\d+)([\d.]+)", said.stdout)
    if match is None:
        raise MachineError(f"{name} does not say its version", fix=_FIX)
    version = match[1] + match[2]
    if int(match[1]) >= 13:
        raise MachineError(f"nvcc {version} cannot compile for compute_{ARCH} any more", fix=_FIX)
    host = os.environ.get("CUDAHOSTCXX") or shutil.which("g++-11") or ""
    return Nvcc(Path(name), version, host)
