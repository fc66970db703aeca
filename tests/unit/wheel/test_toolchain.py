"""What may compile vLLM, with compilers that say what real ones say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_p40.errors import MachineError
from verl_p40.wheel.toolchain import JOB_BYTES, count_jobs, find_toolchain

NVCC = """#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release {version}, V{version}.89"
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def machine(folder: Path, cuda: str = "11.8", gcc: str = "11") -> dict[str, str]:
    """The environment of a machine with this CUDA and this gcc on PATH."""
    nvcc = program(folder / "cuda" / "bin" / "nvcc", NVCC.format(version=cuda))
    name = f"g++-{gcc}" if gcc in ("9", "10", "11") else "g++"
    host = program(folder / "usr" / name, f"#!/bin/sh\necho {gcc}\n")
    return {"PATH": f"{host.parent}:{nvcc.parent}:/usr/bin:/bin"}


def test_the_toolkit_on_path_and_the_newest_host_compiler_that_it_takes(tmp_path: Path) -> None:
    environ = machine(tmp_path)
    program(tmp_path / "usr" / "g++-10", "#!/bin/sh\necho 10\n")
    program(tmp_path / "usr" / "gcc-11", "#!/bin/sh\necho 11\n")
    found = find_toolchain(environ)
    assert found.cuda_home == tmp_path / "cuda"
    assert found.cuda == "11.8"
    assert (found.host.name, found.gcc, found.cc.name) == ("g++-11", 11, "gcc-11")


def test_cuda_home_and_cudahostcxx_are_taken_at_their_word(tmp_path: Path) -> None:
    environ = machine(tmp_path / "other")
    mine = machine(tmp_path / "mine", gcc="9")
    environ["CUDA_HOME"] = str(tmp_path / "mine" / "cuda")
    environ["CUDAHOSTCXX"] = str(tmp_path / "mine" / "usr" / "g++-9")
    found = find_toolchain(environ)
    assert mine and found.cuda_home == tmp_path / "mine" / "cuda"
    assert (found.host, found.gcc) == (tmp_path / "mine" / "usr" / "g++-9", 9)


@pytest.mark.parametrize("named", [True, False])
def test_another_cuda_is_named(tmp_path: Path, named: bool) -> None:
    environ = machine(tmp_path, cuda="12.4")
    if named:
        environ["CUDA_HOME"] = str(tmp_path / "cuda")
    with pytest.raises(MachineError) as refused:
        find_toolchain(environ)
    assert "is CUDA 12.4" in refused.value.message
    assert "11.8" in refused.value.message
    assert "CUDA_HOME" in refused.value.fix


def test_a_cuda_home_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="has no bin/nvcc that works"):
        find_toolchain({**machine(tmp_path), "CUDA_HOME": str(tmp_path)})


@pytest.mark.parametrize("gcc", ["12", "14", "8", "nonsense"])
def test_a_host_compiler_that_nvcc_or_torch_does_not_take(tmp_path: Path, gcc: str) -> None:
    environ = machine(tmp_path, gcc="11")
    environ["CUDAHOSTCXX"] = str(program(tmp_path / "cxx", f"#!/bin/sh\necho {gcc}\n"))
    with pytest.raises(MachineError) as refused:
        find_toolchain(environ)
    assert str(tmp_path / "cxx") in refused.value.message
    assert "g++-11" in refused.value.fix


def test_a_named_host_compiler_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="CUDAHOSTCXX=g\\+\\+-99 is not there"):
        find_toolchain({**machine(tmp_path), "CUDAHOSTCXX": "g++-99"})


@pytest.mark.parametrize(
    ("asked", "gib", "cores", "jobs"),
    [(None, 24, 2, 2), (None, 7, 4, 2), (None, 3, 8, 1), (4, 12, 2, 4), (None, 64, 16, 16)],
)
def test_jobs_by_cores_and_memory(asked: int | None, gib: int, cores: int, jobs: int) -> None:
    assert count_jobs(asked, gib << 30, cores) == jobs


@pytest.mark.parametrize(
    ("asked", "memory", "fix"),
    [(8, 4 * JOB_BYTES, "--jobs 4"), (None, JOB_BYTES - 1, "stop other programs")],
)
def test_too_little_memory_is_said_before_minutes_are_lost(
    asked: int | None, memory: int, fix: str
) -> None:
    with pytest.raises(MachineError) as refused:
        count_jobs(asked, memory, 16)
    assert "GiB are available" in refused.value.message
    assert fix in refused.value.fix
