"""Proofs of patches/vllm/build by nvcc 11.8: what did not compile for sm_61 does.

nvcc 11.8 is the machine's own, or else fetched (cudakit.py). Torch's headers are the stack's. A
minute of a core each, at most.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cudakit
import pytest

from verl_p40.kernels.capability import Capability
from verl_p40.kernels.inspect import inspect
from verl_p40.kernels.verdict import Verdict

ARCH = "61"


@dataclass(frozen=True)
class Compiler:
    cuda: cudakit.Cuda
    torch: Path

    def __call__(self, tree: Path, source: str, output: Path) -> subprocess.CompletedProcess[str]:
        """Compile one file of csrc/ as vLLM's build does (cmake/utils.cmake, torch's flags)."""
        include = self.torch / "include"
        system = [include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
        return subprocess.run(
            [
                self.cuda.nvcc, "-ccbin", self.cuda.host, "-c", tree / source, "-o", output,
                "-gencode", f"arch=compute_{ARCH},code=sm_{ARCH}", "-std=c++17", "-O2",
                "--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xcompiler", "-fPIC",
                "-DENABLE_FP8", "-DTORCH_EXTENSION_NAME=x", "-DPy_LIMITED_API=3",
                "-D_GLIBCXX_USE_CXX11_ABI=0", "-D__CUDA_NO_HALF_OPERATORS__",
                "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
                "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", f"-I{tree / 'csrc/torch_types_only'}", f"-I{tree / 'csrc'}",
                *(word for path in [*system, *self.cuda.include] for word in ("-isystem", path)),
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    folder = Path(torch.origin).parent
    return Compiler(cudakit.find(folder.parent), folder)


def kernels(binary: Path) -> list[str]:
    """The kernels in an object, every one of which has native code for sm_61 and no other code."""
    report = inspect(str(binary), Capability.parse(ARCH), None, names=True)
    assert report.verdict is Verdict.NATIVE
    (file,) = report.files
    assert set(file.targets) == {f"sm_{ARCH}"}
    return [name for _, _, names in file.kernels for name in names]


def test_moe_kernels_compile_for_sm_61(compiler: Compiler, tree: Path, tmp_path: Path) -> None:
    done = compiler(tree, "csrc/moe/moe_wna16.cu", tmp_path / "moe.o")
    assert done.returncode == 0, done.stderr[:2000]
    assert any("moe_wna16" in name for name in kernels(tmp_path / "moe.o"))


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


def test_representative_kernels_compile_for_sm_61(
    compiler: Compiler, tree: Path, tmp_path: Path
) -> None:
    """One file of the default path and the one that needed a patch, both at a time: CI's share."""
    wanted = {
        "csrc/layernorm_kernels.cu": "rms_norm_kernelIf",
        "csrc/moe/moe_wna16.cu": "moe_wna16",
    }
    objects = {source: tmp_path / f"{Path(source).stem}.o" for source in wanted}
    with ThreadPoolExecutor(len(wanted)) as pool:
        done = list(pool.map(lambda item: compiler(tree, *item), objects.items()))
    for (source, name), one in zip(wanted.items(), done, strict=True):
        assert one.returncode == 0, one.stderr[:2000]
        assert any(name in kernel for kernel in kernels(objects[source]))
