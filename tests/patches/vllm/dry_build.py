"""What vLLM's build decides, without compiling: setup.py run dry, and CMake's configure step.

Both run as they are. setup.py gets a stand-in for torch (a CUDA 11.8 build) and for nvcc's
version line; CMakeLists.txt gets a stand-in for torch's CMake package that says what the real one
does for TORCH_CUDA_ARCH_LIST. No file that vLLM ships is replaced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TORCH = """
class version:
    cuda, hip = "11.8", None
class utils:
    cmake_prefix_path = {prefix!r}
"""
_EXTENSION = 'CUDA_HOME, ROCM_HOME = {cuda!r}, None\nCOMMON_NVCC_FLAGS = ["-DCOMMON"]\n'
_SCM = 'def get_version(write_to=None):\n    return "0.8.5.post1"\n'
_NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n"

_RUN_SETUP = """
import json, os, sys
import setuptools
asked = {}
setuptools.setup = lambda **arguments: asked.update(arguments)
sys.argv = ["setup.py", "bdist_wheel"]
exec(compile(open("setup.py").read(), "setup.py", "exec"),
     {"__name__": "__main__", "__file__": os.path.abspath("setup.py")})
print(json.dumps({
    "version": asked["version"],
    "install_requires": asked["install_requires"],
    "package_data": asked["package_data"],
    "extensions": {e.name: bool(e.optional) for e in asked["ext_modules"]},
}))
"""

_TORCH_CMAKE = """
set(CUDA_FOUND TRUE)
set(CUDA_VERSION 11.8)
set(CMAKE_CUDA_COMPILER_VERSION 11.8.89)
set(Torch_VERSION 2.6.0)
set(CMAKE_CUDA_FLAGS "{flags}")
foreach(target torch CUDA::cudart CUDA::cuda_driver)
  add_library(${{target}} INTERFACE IMPORTED GLOBAL)
endforeach()
"""

_GIT = """#!/bin/sh
case $1 in --version) echo git version 2.39.5 ;; *) echo "no network" >&2; exit 128 ;; esac
"""


@dataclass(frozen=True)
class Configured:
    """The outcome of CMake's configure step."""

    code: int
    output: str
    targets: tuple[str, ...]
    fetched: tuple[str, ...]
    """The projects whose sources it set out to fetch, successfully or not."""
    includes: tuple[tuple[str, ...], ...]
    """Of every target, the folders that its sources' headers are looked for in, in order."""


def find_cmake() -> str:
    """The interpreter's own cmake (a PyPI package), else the system's; empty if too old for vLLM."""
    for found in (Path(sys.executable).with_name("cmake"), shutil.which("cmake")):
        if found is None or not Path(found).exists():
            continue
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
        if tuple(map(int, done.stdout.split()[2].split(".")[:2])) >= (3, 26):
            return str(found)
    return ""


def _stand_ins(folder: Path, cmake: Path) -> Path:
    site = folder / "site"
    cuda = folder / "cuda"
    files = {
        site / "torch" / "__init__.py": _TORCH.format(prefix=str(cmake)),
        site / "torch" / "utils" / "__init__.py": f"cmake_prefix_path = {str(cmake)!r}\n",
        site / "torch" / "utils" / "cpp_extension.py": _EXTENSION.format(cuda=str(cuda)),
        site / "setuptools_scm.py": _SCM,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    nvcc = cuda / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(_NVCC)
    nvcc.chmod(0o755)
    return site


def run_setup(tree: Path, scratch: Path, archs: str) -> dict[str, Any]:
    """What setup.py passes to setuptools for ``TORCH_CUDA_ARCH_LIST=archs``."""
    site = _stand_ins(scratch, scratch)
    done = subprocess.run(
        [sys.executable, "-c", _RUN_SETUP],
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), *sys.path[1:]]),
            "TORCH_CUDA_ARCH_LIST": archs,
            "VLLM_TARGET_DEVICE": "cuda",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def configure(tree: Path, scratch: Path, archs: str) -> Configured:
    """Run CMake's configure step for these architectures, with git cut off from the network."""
    package = scratch / "torch-cmake"
    site = _stand_ins(scratch, package)
    wanted = [item.replace(".", "").partition("+") for item in archs.split(";")]
    codes = [(arch, f"sm_{arch}") for arch, _, _ in wanted]
    codes += [(arch, f"compute_{arch}") for arch, _, ptx in wanted if ptx]
    flags = " ".join(f"-gencode arch=compute_{arch},code={code}" for arch, code in codes)
    package.mkdir()
    (package / "TorchConfig.cmake").write_text(_TORCH_CMAKE.format(flags=flags))
    tools = scratch / "tools"
    tools.mkdir()
    (tools / "git").write_text(_GIT)
    (tools / "git").chmod(0o755)
    done = subprocess.run(
        [
            find_cmake(), "--log-level=DEBUG", "-S", str(tree), "-B", str(scratch / "build"),
            f"-DVLLM_PYTHON_EXECUTABLE={sys.executable}", "-DVLLM_TARGET_DEVICE=cuda",
            f"-DFETCHCONTENT_BASE_DIR={scratch / 'deps'}", f"-DGIT_EXECUTABLE={tools / 'git'}",
        ],
        env={
            **{k: v for k, v in os.environ.items() if not k.endswith("_SRC_DIR")},
            "PYTHONPATH": str(site),
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
    )  # fmt: skip
    listed = subprocess.run(
        [find_cmake(), "--build", str(scratch / "build"), "--target", "help"],
        capture_output=True,
        text=True,
    )
    targets = tuple(
        sorted(line.lstrip(". ").partition(":")[0].strip() for line in listed.stdout.splitlines())
    )
    fetched = sorted({path.name.rpartition("-")[0] for path in (scratch / "deps").glob("*-*")})
    includes = [
        tuple(re.findall(r"-I(\S+)", flags.read_text()))
        for flags in sorted((scratch / "build").glob("CMakeFiles/*.dir/flags.make"))
    ]
    return Configured(
        done.returncode, done.stdout + done.stderr, targets, tuple(fetched), tuple(includes)
    )
