"""Proofs of patches/vllm/build by nvcc 11.8: what did not compile for sm_61 does.

They need nvcc 11.8 (``CUDA_HOME``, or on PATH), a host compiler that it takes (``CUDAHOSTCXX``, or
g++-11 on PATH) and torch's headers; docs/vllm.md says where to get them. Minutes of a core each.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ARCH = "61"


@dataclass(frozen=True)
class Compiler:
    nvcc: str
    host: str
    torch: Path

    def __call__(self, tree: Path, source: str, output: Path) -> subprocess.CompletedProcess[str]:
        """Compile one file of csrc/ as vLLM's build does (cmake/utils.cmake, torch's flags)."""
        include = self.torch / "include"
        return subprocess.run(
            [
                self.nvcc, "-ccbin", self.host, "-c", str(tree / source), "-o", str(output),
                "-gencode", f"arch=compute_{ARCH},code=sm_{ARCH}", "-std=c++17", "-O2",
                "--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xcompiler", "-fPIC",
                "-DENABLE_FP8", "-DTORCH_EXTENSION_NAME=x", "-DPy_LIMITED_API=3",
                "-D_GLIBCXX_USE_CXX11_ABI=0", "-D__CUDA_NO_HALF_OPERATORS__",
                "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
                "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", f"-I{tree / 'csrc'}",
                "-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include"),
                "-isystem", sysconfig.get_paths()["include"],
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    home = os.environ.get("CUDA_HOME")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc")
    said = ""
    if nvcc and Path(nvcc).exists():
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        said = next((line for line in done.stdout.splitlines() if "release" in line), "")
    if "release 11.8" not in said:
        pytest.skip(f"no nvcc 11.8 (CUDA_HOME, PATH): {said or 'none found'}")
    host = os.environ.get("CUDAHOSTCXX") or shutil.which("g++-11")
    if host is None:
        pytest.skip("no host compiler that nvcc 11.8 takes (CUDAHOSTCXX, g++-11)")
    torch = importlib.util.find_spec("torch")
    assert nvcc is not None and torch is not None and torch.origin is not None
    return Compiler(nvcc, host, Path(torch.origin).parent)


def architectures(compiler: Compiler, binary: Path) -> str:
    tool = Path(compiler.nvcc).with_name("cuobjdump")
    listed = subprocess.run(
        [tool, "--list-elf", binary], capture_output=True, text=True, check=True
    )
    return listed.stdout


def test_moe_kernels_compile_for_sm_61(compiler: Compiler, tree: Path, tmp_path: Path) -> None:
    done = compiler(tree, "csrc/moe/moe_wna16.cu", tmp_path / "moe.o")
    assert done.returncode == 0, done.stderr[:2000]
    assert f"sm_{ARCH}.cubin" in architectures(compiler, tmp_path / "moe.o")


@pytest.mark.parametrize(
    "source",
    [
        "csrc/quantization/cutlass_w8a8/scaled_mm_entry.cu",
        "csrc/sparse/cutlass/sparse_scaled_mm_entry.cu",
    ],
)
def test_the_entries_of_cutlass_kernels_compile_without_cutlass(
    compiler: Compiler, tree: Path, tmp_path: Path, source: str
) -> None:
    done = compiler(tree, source, tmp_path / "entry.o")
    assert done.returncode == 0, done.stderr[:2000]


def test_a_kernel_of_the_default_path_compiles_for_sm_61(
    compiler: Compiler, tree: Path, tmp_path: Path
) -> None:
    done = compiler(tree, "csrc/layernorm_kernels.cu", tmp_path / "layernorm.o")
    assert done.returncode == 0, done.stderr[:2000]
    assert f"sm_{ARCH}.cubin" in architectures(compiler, tmp_path / "layernorm.o")
