"""nvcc 11.8 for the tests: what the machine has, else 120 MB of packages unpacked into the cache.

Debian's ``nvidia-cuda-dev`` with all of CUDA's headers is 774 MB, for its static libraries. The
headers that nvcc needs are NVIDIA's own wheels of the same version; those of cuBLAS, cuSPARSE and
cuSOLVER, which torch's headers include and no kernel uses, come with the training stack (CUDA 12.4).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_p40.errors import MachineError, NetworkError
from verl_p40.stack import http, paths
from verl_p40.stack.download import download
from verl_p40.stack.fetch import cached_path
from verl_p40.stack.index import SimpleIndex, index_url
from verl_p40.wheel.toolchain import find_toolchain

sys.path.append(str(Path(__file__).parents[2] / "image"))
import debiankit

SUITE = "bookworm"
PACKAGES = (
    *("nvidia-cuda-toolkit", "g++-11", "libgcc-11-dev", "libstdc++-11-dev"),
    *("libthrust-dev", "libcub-dev", "libcu++-dev"),
)
WHEELS = {
    "nvidia-cuda-nvcc-cu11": "f8e1e995166c884f2f5bf94975d7abb89175363b8712f7f81cd38d0df1b2cd85",
    "nvidia-cuda-runtime-cu11": "92d04069a987e1fbc9213f8376d265df0f7bb42617d44f5eda1f496acea7f2d1",
}
"""Of version 11.8.89, by sha256."""
_PROFILE = """TOP              = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH            += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES        +=  "-I$(TOP)/include" $(_SPACE_)
"""


@dataclass(frozen=True)
class Cuda:
    """``include`` has what torch's headers need beside those in the toolkit's own folder."""

    nvcc: Path
    host: Path
    include: tuple[Path, ...] = ()


def find(site_packages: Path) -> Cuda:
    """The machine's CUDA 11.8 and g++ (CUDA_HOME, CUDAHOSTCXX, PATH), else those of the cache.

    Args:
        site_packages: of the training stack.

    Skips the test where there is neither a toolkit nor a Debian mirror or package index; fails
    where what was downloaded does not work.
    """
    try:
        chain = find_toolchain()
    except MachineError:
        if os.environ.get("CUDA_HOME") or os.environ.get("CUDAHOSTCXX"):
            raise  # named, and wrong
    else:
        return Cuda(chain.cuda_home / "bin" / "nvcc", chain.host)
    folder = ready()
    libraries = [site_packages / "nvidia" / name / "include" for name in _LIBRARIES]
    return Cuda(
        folder / "bin" / "nvcc", folder / "gcc" / "bin" / _GCC, (folder / "include", *libraries)
    )


def ready() -> Path:
    """The toolkit in the cache, made first where it is not there yet."""
    folder = paths.cache_home() / f"nvcc-11.8.89-{SUITE}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".nvcc-", dir=folder.parent) as name:
            _make(Path(name))
            if not folder.is_dir():
                (Path(name) / "made").rename(folder)
    return folder


_LIBRARIES = ("cublas", "cusparse", "cusolver")
_GCC = "x86_64-linux-gnu-g++-11"


def _make(scratch: Path) -> None:
    """Lay the packages out as a CUDA toolkit is, in ``scratch/made``."""
    try:
        wheels = [_wheel(project, sha256) for project, sha256 in WHEELS.items()]
    except (MachineError, NetworkError) as error:
        pytest.skip(error.message)
    root = debiankit.all_unpacked(
        PACKAGES, scratch / "debian", suite=SUITE, components="main contrib non-free"
    )
    made = scratch / "made"
    own = root / "usr" / "lib" / "nvidia-cuda-toolkit"
    for name in ("bin", "nvvm/bin", "include", "gcc"):
        (made / name).mkdir(parents=True)
    for path in [own / "bin" / "nvcc", own / "bin" / "crt", *_programs(root)]:
        shutil.move(path, made / "bin")
    shutil.move(own / "bin" / "cicc", made / "nvvm" / "bin")
    shutil.move(own / "libdevice", made / "nvvm")
    (made / "bin" / "nvcc.profile").write_text(_PROFILE)
    # gcc finds its parts and headers relative to its program: they keep their places.
    (root / "usr" / "bin").rename(made / "gcc" / "bin")
    (root / "usr" / "lib").rename(made / "gcc" / "lib")
    (made / "gcc" / "include").mkdir()
    for path in (root / "usr" / "include").iterdir():
        gcc = path.name in ("c++", "x86_64-linux-gnu")
        shutil.move(path, made / ("gcc/include" if gcc else "include"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                inside = member.partition("/include/")[2]
                if inside.endswith((".h", ".hpp")):
                    target = made / "include" / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(member))


def _programs(root: Path) -> list[Path]:
    return [root / "usr" / "bin" / name for name in ("cudafe++", "fatbinary", "ptxas", "nvlink")]


def _wheel(project: str, sha256: str) -> Path:
    session = http.session()
    for file in SimpleIndex(index_url("packages"), session).files(project):
        if file.sha256 == sha256:
            target = cached_path(sha256, file.filename)
            download(file.url, target, sha256, session)
            return target
    pytest.skip(f"the package index does not have {project} 11.8.89")


if __name__ == "__main__":
    # In .venv, where uv is and knows the package index; a test in the stack then finds it made.
    try:
        find_toolchain()
    except MachineError:
        try:
            print(ready())
        except pytest.skip.Exception as why:
            sys.exit(f"error: no CUDA 11.8 here, and none to be had: {why}")
