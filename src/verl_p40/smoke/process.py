"""A check's process: started, timed, ended with all it has started, and judged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from verl_p40.smoke import child
from verl_p40.smoke.model import Check, Context, Result
from verl_p40.stack.env import StackEnv
from verl_p40.train.failures import clean, describe_exit

_POLL = 0.05
_LINES = 40
"""Last lines of a failed check that are kept for the report."""


def run_check(
    check: Check,
    context: Context,
    stack: StackEnv,
    log: Path,
    tick: Callable[[float], None] = lambda seconds: None,
) -> Result:
    """Run one check in a process of its own; ``log`` gets what it prints.

    A process that dies without a result, of a signal or otherwise, is a failed check, and so is
    one that outlives its limit. ``tick`` is told the seconds so far, a few times a second.
    Nothing that the check has started is left. Call it from the main thread: the kernel ends the
    process should this one die.
    """
    stem = context.scratch / f"check-{check.name}"
    context_file, result_file = stem.with_suffix(".context"), stem.with_suffix(".result")
    result_file.unlink(missing_ok=True)
    context_file.write_text(json.dumps(context.document()), encoding="utf-8")
    python = stack.python if check.where == "stack" else Path(sys.executable)
    command = [str(python), "-m", child.__name__, str(os.getpid()), check.entry]
    command += [str(context_file), str(result_file)]
    began = time.monotonic()
    with log.open("wb") as out:
        started = subprocess.Popen(
            command,
            env=_environ(stack, check, context),
            cwd=Path.cwd(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    expired = False
    try:
        while started.poll() is None and not expired:
            expired = time.monotonic() - began > check.limit
            tick(time.monotonic() - began)
            time.sleep(_POLL)
    finally:
        _end(started, check.grace)
    seconds = time.monotonic() - began
    result = _judge(check, int(started.returncode), expired, result_file, log)
    return replace(result, seconds=seconds)


def _environ(stack: StackEnv, check: Check, context: Context) -> dict[str, str]:
    extra = {
        # Kernels that an earlier run compiled would be no proof that the compiler works.
        "TRITON_CACHE_DIR": str(context.scratch / "triton"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "USE_TF": "0",
    }
    if context.device == "cpu":
        extra["CUDA_VISIBLE_DEVICES"] = ""
    environ = stack.environ(extra)
    if check.where == "command":
        # Our own interpreter, told which stack to use.
        environ.pop("VIRTUAL_ENV", None)
    return environ


def _end(started: subprocess.Popen[bytes], grace: float) -> None:
    """End the process and its session: asked first, then killed."""
    if started.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(timeout=grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def _judge(check: Check, code: int, expired: bool, result_file: Path, log: Path) -> Result:
    lines = _last_lines(log)
    if expired:
        text = f"not done after its limit of {check.limit:.0f} s"
        return Result(check, "failed", text, output=lines)
    try:
        document = json.loads(result_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        text = f"its process ended without a result, {describe_exit(code)}"
        if cause := _cause(lines):
            text += f": {cause}"
        return Result(check, "failed", text, output=lines)
    if code != 0:
        text = f"its process ended badly after the check, {describe_exit(code)}"
        return Result(check, "failed", text, output=lines)
    failed = document["verdict"] == "failed"
    return Result(
        check,
        document["verdict"],
        document["text"],
        category=document["category"],
        details=document["details"],
        output=lines if failed else (),
    )


_SIGNS = ("LLVM ERROR", "CUDA error", "terminate called")


def _cause(lines: tuple[str, ...]) -> str:
    """The line that names the cause: faulthandler's Python stack follows it."""
    for line in lines:
        if any(sign in line for sign in _SIGNS):
            return line
    for number, line in enumerate(lines):
        if line.startswith("Fatal Python error"):
            return lines[number - 1] if number else line
    return lines[-1] if lines else ""


def _last_lines(log: Path) -> tuple[str, ...]:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    lines = [clean(line)[:400] for line in text.splitlines()]
    return tuple(line for line in lines if line)[-_LINES:]
