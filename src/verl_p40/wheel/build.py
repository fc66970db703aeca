"""Building the wheel: the patched sdist, torch's headers and the compilers become one file.

Everything happens in a work folder that is kept: a build that was killed goes on where it was, file
by file. The wheel gets its own name when it is complete and has been looked into.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_p40.errors import DiskError, MachineError, TreeError, UsageError
from verl_p40.kernels.capability import Capability
from verl_p40.kernels.inspect import TargetReport, inspect
from verl_p40.kernels.verdict import Verdict
from verl_p40.patches.project import Project
from verl_p40.patches.queue import Queue, default_directory, load_queue
from verl_p40.patches.release import patched_release
from verl_p40.stack import lockfile, paths, pins
from verl_p40.stack.hold import exclusive
from verl_p40.stack.uv import uv_binary
from verl_p40.wheel.toolchain import Toolchain, count_jobs, find_toolchain, memory_available

BUILD_LOCK = "vllm-build.txt"
DISK_BYTES = 2 * 2**30
"""Room that the work folder needs: sources, objects, libraries and the wheel, from above."""
_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")
_WARNING = re.compile(r"\bwarning(:| #\d| [A-Z]\w*:)")
_ERROR = re.compile(r"\berror(:| #\d)|^CMake Error|^ninja: |Killed|No space left")
_ARCHS = re.compile(r"\d+\.\d(;\d+\.\d)*(\+PTX)?")
_PTX = "+PTX"

_ASK_TORCH = """
import json, os, torch
header = "include/torch/csrc/api/include/torch/all.h"
print(json.dumps({
    "version": torch.__version__,
    "headers": os.path.isfile(os.path.join(os.path.dirname(torch.__file__), header)),
}))
"""


@dataclass(frozen=True)
class Request:
    """What to build, with everything decided."""

    python: Path
    """An interpreter with the torch that the wheel is for."""
    toolchain: Toolchain
    archs: str
    """As ``TORCH_CUDA_ARCH_LIST`` has it: ``6.1+PTX``, ``6.0;6.1``."""
    jobs: int
    out: Path
    work: Path


@dataclass
class Built:
    """A finished wheel and how it came to be.

    Attributes:
        compiled: seconds by source file, from ninja's log; empty for files that were there.
        architectures: what every library with GPU code in the wheel holds.
    """

    wheel: Path
    version: str
    torch: str
    bytes: int
    seconds: float
    warnings: int
    compiled: dict[str, float] = field(default_factory=dict)
    architectures: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "wheel": str(self.wheel), "seconds": round(self.seconds, 1)}


def default_work() -> Path:
    """Where builds are kept: below the cache, so safe to delete."""
    return paths.cache_home() / "vllm-wheel"


def make_request(
    python: Callable[[], Path],
    archs: str,
    out: Path,
    *,
    work: Path | None = None,
    jobs: int | None = None,
) -> Request:
    """Decide what is left open: the compilers, and how many of them run at a time.

    ``python`` gives the interpreter. It is called last, for it may install the training stack, and
    what is missing here is said before that.

    Raises:
        UsageError: ``archs`` is no list of compute capabilities.
        MachineError: no such compilers, or too little memory for them.
    """
    archs = check_archs(archs)
    chain = find_toolchain()
    count = count_jobs(jobs, memory_available(), len(os.sched_getaffinity(0)))
    return Request(
        python=python().absolute(),
        toolchain=chain,
        archs=archs,
        jobs=count,
        out=out,
        work=(work or default_work()).absolute(),
    )


def check_archs(text: str) -> str:
    """``6.1``, ``6.0;6.1`` or ``6.1+PTX``: in ascending order, and PTX of the newest alone.

    Raises:
        UsageError: something else, or an architecture that CUDA 11.8 does not compile for.
    """
    archs = ";".join(re.split(r"[;,\s]+", text.strip()))
    if not _ARCHS.fullmatch(archs):
        raise UsageError(f"--arch {text!r}: not compute capabilities", fix="--arch 6.1")
    ptx = _PTX if archs.endswith(_PTX) else ""
    plain = archs.removesuffix(_PTX).split(";")
    listed = sorted({tuple(map(int, arch.split("."))) for arch in plain})
    if listed[0] < (6, 0) or listed[-1] > (9, 0):
        raise UsageError(
            f"--arch {text}: this build is for 6.0 to 9.0",
            fix="--arch 6.1 for a P40, 6.0 for a P100",
        )
    return ";".join(f"{major}.{minor}" for major, minor in listed) + ptx


def check_torch(python: Path) -> str:
    """The version of the torch in ``python``'s environment.

    Raises:
        MachineError: it has none, another one than the pinned, or one without headers.
    """
    wanted = pins.load().train.packages["torch"].version
    done = subprocess.run([python, "-c", _ASK_TORCH], capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MachineError(
            f"{python} has no torch that works: {words[-1]}", fix="verl-p40 stack install"
        )
    found = json.loads(done.stdout)
    if found["version"].partition("+")[0] != wanted:
        raise MachineError(
            f"{python} has torch {found['version']}; a wheel built against it would not load "
            f"beside torch {wanted}, which the stack pins",
            fix="verl-p40 stack install, and no --python",
        )
    if not found["headers"]:
        raise MachineError(
            f"the torch of {python} has no headers (an image removes them)",
            fix="build on the host, or the Dockerfile's stage: docs/vllm.md",
        )
    return str(found["version"])


def build(
    request: Request,
    *,
    on_stage: Callable[[str], None] = lambda _: None,
    on_step: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Built:
    """Build the wheel, or go on with a build that was interrupted.

    Raises:
        MachineError: torch is not the pinned one, or the compilers failed; the log is named.
        NetworkError: the sdist or a build tool cannot be downloaded.
        DiskError: too little room for the work folder.
        TreeError: the result lacks code for an architecture that was asked for.
    """
    started = time.monotonic()
    torch = check_torch(request.python)
    queue = load_queue(default_directory("vllm"))
    request.work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(request.work).free
    if free < DISK_BYTES:
        raise DiskError(
            f"{request.work} has {free / 1e9:.1f} GB free, a build takes {DISK_BYTES / 1e9:.0f}",
            fix="free some, or --work DIR on another disk",
        )

    def waiting() -> None:
        on_stage("another process builds in this folder: waiting for it")

    with exclusive(request.work / "lock", waiting):
        tools = _tools(request, on_stage)
        source = _source(request, queue, torch, on_stage)
        log = source.with_name(f"{source.name}.log")
        fresh = source.with_name(f"{source.name}.dist")
        shutil.rmtree(fresh, ignore_errors=True)
        on_stage(
            f"compiling for {request.archs} with CUDA {request.toolchain.cuda}, gcc "
            f"{request.toolchain.gcc}, {request.jobs} at a time; log: {log}"
        )
        before = _ninja_log(source)
        warnings = _run(request, source, tools, fresh, log, on_step)
        (wheel,) = fresh.glob("vllm-*.whl")
        report = check(wheel, request.archs)
        request.out.mkdir(parents=True, exist_ok=True)
        target = request.out / wheel.name
        partial = target.with_name(f".{target.name}.part")
        shutil.copyfile(wheel, partial)
        partial.replace(target)
        shutil.rmtree(fresh)
    compiled = {k: v for k, v in _ninja_log(source).items() if before.get(k) != v}
    return Built(
        wheel=target,
        version=target.name.split("-")[1],
        torch=torch,
        bytes=target.stat().st_size,
        seconds=time.monotonic() - started,
        warnings=warnings,
        compiled=dict(sorted(compiled.items(), key=lambda item: -item[1])),
        architectures={
            file.name.rpartition(":")[2]: dict(file.targets)
            for file in report.files
            if file.targets
        },
    )


def check(wheel: Path, archs: str) -> TargetReport:
    """Look into a wheel for native code for every architecture in ``archs``, and for its PTX.

    Raises:
        TreeError: a library in it lacks some, or none has GPU code at all.
    """
    for arch in archs.removesuffix(_PTX).split(";"):
        report = inspect(str(wheel), Capability.parse(arch), None)
        bad = [f.name for f in report.files if f.verdict not in (Verdict.NATIVE, Verdict.NO_CODE)]
        if bad or report.verdict is not Verdict.NATIVE:
            what = ", ".join(bad) or "no library"
            raise TreeError(
                f"{wheel.name}: {what} lacks native code for {arch}",
                fix="delete the work folder and build again; report it with the log if it stays",
            )
    if archs.endswith(_PTX):
        target = f"compute_{arch.replace('.', '')}"
        if without := [f.name for f in report.files if f.targets and target not in f.targets]:
            raise TreeError(
                f"{wheel.name}: {', '.join(without)} lacks PTX for {arch}",
                fix="report it, with the log",
            )
    return report


def _tools(request: Request, on_stage: Callable[[str], None]) -> Path:
    """CMake, ninja and setuptools by hash, in a folder that is put in front of the interpreter's."""
    lock = lockfile.lock_path(BUILD_LOCK)
    tools = request.work / f"tools-{lockfile.digest(lock)[:12]}"
    if tools.is_dir():
        return tools
    on_stage("installing CMake and ninja")
    partial = tools.with_name(f".{tools.name}")
    shutil.rmtree(partial, ignore_errors=True)
    done = subprocess.run(
        [uv_binary(), "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--target",
         str(partial), "--python", str(request.python), "-r", str(lock)],
        capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise MachineError(
            f"the build tools cannot be installed: {' '.join(done.stderr.split())[:300]}",
            fix="check the network and the package index (PIP_INDEX_URL)",
        )
    partial.rename(tools)
    return tools


def _source(request: Request, queue: Queue, torch: str, on_stage: Callable[[str], None]) -> Path:
    """The patched tree. Of an older queue's tree only the files that differ are written, so ninja
    compiles those alone."""
    python = request.python.resolve().name
    name = f"{queue.version}-torch{torch}-{python}-{request.archs}"
    source = request.work / re.sub(r"[^\w.+-]", "_", name)
    stamp = source.with_name(f"{source.name}.queue")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == queue.digest:
        return source
    on_stage(f"vLLM {queue.version}: fetching the sdist, {len(queue.patches)} patches")
    stamp.unlink(missing_ok=True)
    fresh = source.with_name(f"{source.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    patched_release(queue, fresh)
    _bring_up_to_date(source, fresh, queue.facts)
    shutil.rmtree(fresh)
    stamp.write_text(queue.digest, encoding="utf-8")
    return source


def _bring_up_to_date(source: Path, fresh: Path, facts: Project) -> None:
    """Make ``source`` hold what ``fresh`` does; what is the same keeps its time, builds stay."""
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for root in facts.roots:
        for path in (source / root).rglob("*"):
            name = path.relative_to(source)
            if path.is_file() and name not in wanted and not facts.is_built(name.as_posix()):
                path.unlink()
    for name in wanted:
        old, new = source / name, fresh / name
        if not old.is_file() or not filecmp.cmp(new, old, shallow=False):
            old.parent.mkdir(parents=True, exist_ok=True)
            new.replace(old)


def environment(request: Request, tools: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What setup.py, CMake and nvcc read."""
    chain = request.toolchain
    kept = {k: v for k, v in environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
    programs = [tools / "bin", request.python.parent, chain.cuda_home / "bin"]
    return {
        **kept,
        "PATH": os.pathsep.join([*map(str, programs), environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(tools),
        "CUDA_HOME": str(chain.cuda_home),
        "CUDACXX": str(chain.cuda_home / "bin" / "nvcc"),
        "CUDAHOSTCXX": str(chain.host),
        "CXX": str(chain.host),
        "CC": str(chain.cc),
        "TORCH_CUDA_ARCH_LIST": request.archs,
        "VLLM_TARGET_DEVICE": "cuda",
        "MAX_JOBS": str(request.jobs),
        "CMAKE_BUILD_TYPE": "Release",
    }


def _run(
    request: Request,
    source: Path,
    tools: Path,
    fresh: Path,
    log: Path,
    on_step: Callable[[int, int, str], None],
) -> int:
    """Run setup.py; the number of warnings. cp38: the oldest Python whose ABI it keeps to."""
    command = [str(request.python), "setup.py", "bdist_wheel", "--py-limited-api=cp38"]
    command += ["--dist-dir", str(fresh)]
    warnings = 0
    with log.open("w", encoding="utf-8", errors="replace") as sink:
        process = subprocess.Popen(
            command,
            cwd=source,
            env=environment(request, tools, os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sink.write(line)
                warnings += bool(_WARNING.search(line))
                if step := _STEP.match(line):
                    on_step(int(step[1]), int(step[2]), _what(step[3]))
            code = process.wait()
        finally:
            if process.poll() is None:  # interrupted: the compilers end with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if code:
        raise MachineError(f"the build failed: {_reason(log)}", fix=f"the whole log is {log}")
    return warnings


def _what(step: str) -> str:
    """``csrc/layernorm_kernels.cu`` of ninja's line about it."""
    found = re.search(r"\.dir/(\S+?)\.o$", step)
    return found.group(1) if found else step


def _reason(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    chosen = [line.strip() for line in lines if _ERROR.search(line)][:2] or lines[-1:]
    return " | ".join(chosen)[:400] or "no output"


def _ninja_log(source: Path) -> dict[str, float]:
    """Seconds that each object took, by its source file; the last time it was made."""
    seconds: dict[str, float] = {}
    for log in source.glob("build/temp*/.ninja_log"):
        for line in log.read_text(encoding="utf-8").splitlines()[1:]:
            start, end, _, output, *_ = line.split("\t")
            if output.endswith(".o"):
                seconds[_what(output)] = (int(end) - int(start)) / 1000
    return seconds
