"""What nvcc makes of a source for ``compute_61``, and what ptxas says of that."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_p40.errors import MachineError
from verl_p40.kernels.compile_child import read_report
from verl_p40.numerics.manifest import ARCH
from verl_p40.wheel.toolchain import Toolchain

_DEFINES = (
    *("ENABLE_FP8", "TORCH_EXTENSION_NAME=_C", "_GLIBCXX_USE_CXX11_ABI=0"),
    *("__CUDA_NO_HALF_OPERATORS__", "__CUDA_NO_HALF_CONVERSIONS__"),
    *("__CUDA_NO_HALF2_OPERATORS__", "__CUDA_NO_BFLOAT16_CONVERSIONS__"),
)
"""vLLM's (cmake/utils.cmake) and torch's own for CUDA sources."""


@dataclass(frozen=True)
class Nvcc:
    """nvcc and ptxas of a toolchain."""

    chain: Toolchain

    @property
    def version(self) -> str:
        """As nvcc says it: ``11.8.89``."""
        program = self.chain.cuda_home / "bin" / "nvcc"
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"release [\d.]+, V([\d.]+)", said.stdout)
        return found[1] if found else self.chain.cuda

    def ptx(self, source: Path, output: Path, include: Sequence[Path], csrc: Path) -> None:
        """Compile to PTX with the flags of vLLM's build.

        Args:
            include: of torch, searched as system headers.
            csrc: vLLM's, searched first.

        Raises:
            MachineError: the compiler refuses; its first error is given.
        """
        command = [
            str(self.chain.cuda_home / "bin" / "nvcc"), "-ptx", str(source), "-o", str(output), f"-arch=compute_{ARCH}",
            "-std=c++17", "-O2", "--expt-relaxed-constexpr", "--expt-extended-lambda",
            *(f"-D{name}" for name in _DEFINES), f"-I{csrc}",
        ]  # fmt: skip
        for folder in include:
            command += ["-isystem", str(folder)]
        command += ["-ccbin", str(self.chain.host)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            said = (errors or done.stderr.splitlines() or ["no output"])[0]
            raise MachineError(f"nvcc {self.chain.cuda} cannot compile {source.name}: {said[:300]}")

    def figures(self, ptx: Path) -> dict[str, dict[str, int]]:
        """By entry, what ptxas says of it for sm_61: registers, bytes of spills and static shared.

        Raises:
            MachineError: ptxas refuses it.
        """
        done = subprocess.run(
            [
                self.chain.cuda_home / "bin" / "ptxas",
                "-v",
                f"--gpu-name=sm_{ARCH}",
                ptx,
                "-o",
                os.devnull,
            ],
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
