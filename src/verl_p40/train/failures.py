"""What to tell of a failed trainer: the error that came first, not the one that followed."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^\([\w.:<>-]+ pid=\d+(?:, ip=[\d.]+)?\)\s?")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_METRICS = re.compile(r"step:\d+ - ")
"""verl's console logger: a kilobyte of numbers a step, which metrics.jsonl has too."""
_WIDTH = 400
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:\((?P<inner>[\w.]+)\))?(?::\s?(?P<text>.*))?$")
_FOLLOWERS = ("ActorDiedError", "WorkerCrashedError", "RaySystemError", "ActorUnavailableError")
"""Errors that say that a process is gone, not why."""
_CHAIN = (
    "The above exception was the direct cause",
    "During handling of the above exception",
    "Set the environment variable HYDRA_FULL_ERROR",
)
_SIGNS = re.compile(
    r"(out of memory|OutOfMemory|No space left on device|Segmentation fault|SIGSEGV|SIGABRT"
    r"|SIGBUS|core dumped|memory usage threshold|unhandled exception)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """``headline`` is one line; ``lines`` the last lines around it, without Ray's prefixes."""

    headline: str
    lines: tuple[str, ...]


def clean(line: str) -> str:
    """A log line without colours and without Ray's ``(Worker pid=1)`` in front."""
    line = _ANSI.sub("", line.rsplit("\r", 1)[-1]).rstrip()
    return _REPEATED.sub("", _RAY_PREFIX.sub("", line))


def explain(log: str, *, around: int = 12) -> Failure:
    """Find the error in a log.

    The first traceback whose error is not Ray's report of a dead process counts; then a line
    with a known sign of a killed process; else the log names none, and its last lines follow.
    Metrics and overlong lines are left out or cut.
    """
    lines = [clean(line) for line in log.splitlines()]
    lines = [line[:_WIDTH] for line in lines if not _METRICS.match(line)]
    errors = _errors(lines)
    causes = [e for e in errors if not any(name in lines[e] for name in _FOLLOWERS)]
    for index in [*causes, *_signs(lines), *errors]:
        start = max(0, index - around + 1)
        return Failure(lines[index], tuple(line for line in lines[start : index + 1] if line))
    last = [line for line in lines if line][-around:]
    return Failure("the log names no error", tuple(last))


def _errors(lines: Sequence[str]) -> list[int]:
    """Indices of the lines that name an exception at the end of a traceback."""
    found = []
    inside = False
    for index, line in enumerate(lines):
        if line.startswith(_TRACEBACK):
            inside = True
        elif inside and line and not line.startswith((" ", "\t")):
            match = _ERROR.match(line)
            if match is None or line.startswith(_CHAIN):
                continue
            if match["kind"].endswith("RayTaskError"):
                # Ray's wrapper: the worker's own frames and error follow.
                continue
            found.append(index)
            inside = False
    return found


def _signs(lines: Sequence[str]) -> list[int]:
    return [index for index, line in enumerate(lines) if _SIGNS.search(line)]


def describe_exit(code: int) -> str:
    """An exit code as people say it; negative codes are signals, as subprocess gives them."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
