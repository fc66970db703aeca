"""The steps around the compilers: what is asked for, whose torch, what the log says, what is inside."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from verl_p40.errors import DiskError, MachineError, TreeError, UsageError
from verl_p40.patches.project import find_project
from verl_p40.wheel import build
from verl_p40.wheel.toolchain import Toolchain

BINARIES = Path(__file__).parents[1] / "kernels" / "binaries"


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("6.1", "6.1"),
        ("6.1+PTX", "6.1+PTX"),
        ("6.1;6.0", "6.0;6.1"),
        ("6.0, 6.1, 6.0+PTX", "6.0;6.1+PTX"),
        ("6.1 9.0", "6.1;9.0"),
    ],
)
def test_architectures(asked: str, meant: str) -> None:
    assert build.check_archs(asked) == meant


@pytest.mark.parametrize("asked", ["sm_61", "", "6", "6.1+PTX;7.0", "native"])
def test_what_is_no_architecture(asked: str) -> None:
    with pytest.raises(UsageError) as refused:
        build.check_archs(asked)
    assert "6.1" in refused.value.fix


@pytest.mark.parametrize("asked", ["5.2", "5.2;6.1", "10.0", "6.1;12.0"])
def test_an_architecture_that_this_build_is_not_for(asked: str) -> None:
    with pytest.raises(UsageError, match=r"6\.0 to 9\.0"):
        build.check_archs(asked)


def python_with(folder: Path, torch: str) -> Path:
    """An interpreter that imports this as torch."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(torch)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_the_torch_of_the_stack_with_its_headers(tmp_path: Path) -> None:
    python = python_with(tmp_path, '__version__ = "2.6.0+cu118"\n')
    with pytest.raises(MachineError, match="has no headers"):
        build.check_torch(python)
    header = tmp_path / "torch/include/torch/csrc/api/include/torch/all.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    assert build.check_torch(python) == "2.6.0+cu118"


def test_another_torch_would_make_a_wheel_for_another_stack(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"has torch 2\.7\.1\+cu126; .* beside torch 2\.6\.0"):
        build.check_torch(python_with(tmp_path, '__version__ = "2.7.1+cu126"\n'))


def test_a_torch_that_does_not_load_says_why(tmp_path: Path) -> None:
    python = python_with(tmp_path, 'raise ImportError("libcudnn.so.9: no such file")\n')
    with pytest.raises(MachineError, match=r"libcudnn\.so\.9: no such file"):
        build.check_torch(python)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (
            "Building CUDA object CMakeFiles/_C.dir/csrc/attention/paged_attention_v2.cu.o",
            "csrc/attention/paged_attention_v2.cu",
        ),
        ("Building CXX object CMakeFiles/_moe_C.dir/csrc/moe/torch_bindings.cpp.o",
         "csrc/moe/torch_bindings.cpp"),
        ("Linking CXX shared module _C.abi3.so", "Linking CXX shared module _C.abi3.so"),
    ],
)  # fmt: skip
def test_ninjas_lines(line: str, what: str) -> None:
    assert build._what(line) == what


def test_the_reason_of_a_failure_is_the_first_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[3/37] Building CUDA object a.o\n"
        "a.cu(12): warning #177-D: variable unused\n"
        'a.cu(39): error: identifier "__hadd2" is undefined\n'
        "1 error detected in the compilation of a.cu.\n"
        "ninja: build stopped: subcommand failed.\n"
        "subprocess.CalledProcessError: ...\n"
    )
    reason = build._reason(log)
    assert reason.startswith('a.cu(39): error: identifier "__hadd2" is undefined')
    assert "warning" not in reason


def test_the_environment_of_the_compilers(tmp_path: Path) -> None:
    chain = Toolchain(tmp_path / "cuda", "11.8", tmp_path / "g++-11", 11)
    request = build.Request(
        tmp_path / "env" / "python", chain, "6.1+PTX", 2, tmp_path / "dist", tmp_path / "work"
    )
    environ = build.environment(
        request, tmp_path / "tools", {"PATH": "/bin", "VIRTUAL_ENV": "/x", "HTTPS_PROXY": "p"}
    )
    assert environ["TORCH_CUDA_ARCH_LIST"] == "6.1+PTX"
    assert environ["MAX_JOBS"] == "2"
    assert environ["CUDACXX"] == str(tmp_path / "cuda/bin/nvcc")
    assert environ["HTTPS_PROXY"] == "p"
    assert "VIRTUAL_ENV" not in environ
    first, second, third, last = environ["PATH"].split(os.pathsep)
    assert (first, second) == (str(tmp_path / "tools/bin"), str(tmp_path / "env"))
    assert (third, last) == (str(tmp_path / "cuda/bin"), "/bin")


def wheel_of(tmp_path: Path, *binaries: Path) -> Path:
    wheel = tmp_path / "vllm-0.8.5.post1+cu118.sm61-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        for path in binaries:
            archive.write(path, f"vllm/{path.name}")
    return wheel


def test_a_wheel_with_what_was_asked_for(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, BINARIES / "cuda118.so")
    for archs in ("6.1", "6.0;6.1", "6.1+PTX"):
        report = build.check(wheel, archs)
    (library,) = [file for file in report.files if file.targets]
    assert set(library.targets) == {"sm_60", "sm_61", "sm_70", "compute_61"}


def test_a_wheel_without_it_does_not_get_its_name(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match=r"lacks native code for 9\.0"):
        build.check(wheel_of(tmp_path, BINARIES / "cuda118.so"), "6.1;9.0")
    with pytest.raises(TreeError, match=r"cuda118\.so lacks PTX for 6\.0"):
        build.check(wheel_of(tmp_path, BINARIES / "cuda118.so"), "6.0+PTX")
    for_others = tmp_path / "other.so"
    shutil.copy(BINARIES / "cuda130.fatbin", for_others)
    with pytest.raises(TreeError, match=r"other\.so lacks native code for 6\.1"):
        build.check(wheel_of(tmp_path, BINARIES / "cuda118.so", for_others), "6.1")


def test_seconds_by_file_from_ninjas_log(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "temp.linux-x86_64-cpython-310"
    folder.mkdir(parents=True)
    (folder / ".ninja_log").write_text(
        "# ninja log v6\n"
        "10\t61010\t1\tCMakeFiles/_C.dir/csrc/layernorm_kernels.cu.o\taa\n"
        "61010\t61100\t1\t_C.abi3.so\tbb\n"
        "20\t5020\t2\tCMakeFiles/_C.dir/csrc/layernorm_kernels.cu.o\tcc\n"
    )
    assert build._ninja_log(tmp_path) == {"csrc/layernorm_kernels.cu": 5.0}


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "torch/include/torch/csrc/api/include/torch/all.h"
    python = python_with(tmp_path, '__version__ = "2.6.0"\n')
    header.parent.mkdir(parents=True)
    header.write_text("")
    chain = Toolchain(tmp_path, "11.8", tmp_path / "g++", 11)
    request = build.Request(python, chain, "6.1", 1, tmp_path / "dist", tmp_path / "work")
    monkeypatch.setattr(build, "DISK_BYTES", 1 << 60)
    with pytest.raises(DiskError, match="GB free, a build takes"):
        build.build(request)
    assert not (tmp_path / "dist").exists()


def test_an_updated_queue_touches_only_what_it_changes(tmp_path: Path) -> None:
    """By times, which are what ninja goes by."""

    def tree(name: str, files: dict[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        return tmp_path / name

    source = tree(
        "source",
        {
            "setup.py": "1", "csrc/a.cu": "a", "csrc/b.cu": "b", "csrc/old/gone.cu": "x",
            "vllm/_version.py": "built", "build/temp/a.o": "object",
        },
    )  # fmt: skip
    for path in source.rglob("*"):
        os.utime(path, (1, 1))
    fresh = tree("fresh", {"setup.py": "1", "csrc/a.cu": "a", "csrc/b.cu": "B", "csrc/c.cu": "c"})
    build._bring_up_to_date(source, fresh, find_project("vllm"))
    times = {
        path.relative_to(source).as_posix(): path.stat().st_mtime == 1
        for path in source.rglob("*")
        if path.is_file()
    }
    assert times == {
        "setup.py": True, "csrc/a.cu": True, "csrc/b.cu": False, "csrc/c.cu": False,
        "vllm/_version.py": True, "build/temp/a.o": True,
    }  # fmt: skip
    assert (source / "csrc/b.cu").read_text() == "B"
