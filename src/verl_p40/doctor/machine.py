"""A machine as checks see it: programs' outputs, files, variables; this one, or a recorded one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from verl_p40.stack import paths

MAX_TEXT = 4_000_000
"""Characters kept of a file or of a program's output."""

RUNS = "runs"
"""As a path of :meth:`Machine.space`: the folder of runs, wherever this machine has it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """What a program printed, both streams in one. ``timed_out``: it was ended after its limit."""

    code: int
    text: str
    timed_out: bool = False


@dataclass(frozen=True)
class Space:
    """Bytes of a file system."""

    total: int
    free: int


@dataclass(frozen=True)
class Subject:
    """What the user asks about besides the machine: scripts, a model, parquet files."""

    scripts: tuple[str, ...] = ()
    model: str = ""
    data: tuple[str, ...] = ()


class Machine(Protocol):
    """What a check may ask. Every method answers within its limit and never raises."""

    live: bool
    """Whether this is the machine that we run on."""
    subject: Subject

    def command(self, *words: str, limit: float = 10.0) -> Output | None:
        """Run a program; None where it is not installed (or was not recorded)."""

    def text(self, path: str) -> str | None:
        """A small text file; None where it cannot be read."""

    def names(self, folder: str) -> tuple[str, ...]:
        """The entries of a folder, sorted; empty where there is none."""

    def variable(self, name: str) -> str | None:
        """An environment variable."""

    def space(self, path: str) -> Space | None:
        """The file system that ``path``, or the nearest folder above it, is on."""

    def reach(self, host: str, port: int) -> str | None:
        """Connect by TCP: "" when it answers, else why not; None when nobody has tried."""

    def told(self, question: str) -> bool:
        """Whether a command or a variable was asked for: of a recording, what None means."""


class Live:
    """This machine. The same question is asked once."""

    live = True

    def __init__(self, subject: Subject = Subject()) -> None:
        self.subject = subject
        self._answers: dict[tuple[Any, ...], Any] = {}
        self._locks: dict[tuple[Any, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def _once(self, key: tuple[Any, ...], ask: Callable[[], T]) -> T:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._answers:
                self._answers[key] = ask()
            answer: T = self._answers[key]
            return answer

    def command(self, *words: str, limit: float = 10.0) -> Output | None:
        return self._once(("command", *words), lambda: _run(words, limit))

    def text(self, path: str) -> str | None:
        return self._once(("text", path), lambda: _read(path))

    def names(self, folder: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in Path(folder).iterdir()))
        except OSError:
            return ()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def space(self, path: str) -> Space | None:
        place = paths.runs_home() if path == RUNS else Path(path)
        try:
            there = next(p for p in [place, *place.parents] if p.exists())
            usage = shutil.disk_usage(there)
        except (OSError, StopIteration):
            return None
        return Space(usage.total, usage.free)

    def reach(self, host: str, port: int) -> str | None:
        return self._once(("reach", host, port), lambda: _reach(host, port))

    def told(self, question: str) -> bool:
        return True


def _run(words: Sequence[str], limit: float) -> Output | None:
    program = shutil.which(words[0])
    if program is None:
        return None
    # The C locale: what programs print is read, here and in recordings.
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        child = subprocess.Popen(
            [program, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
        )
    except OSError as error:
        return Output(126, f"cannot be started: {error.strerror}")
    try:
        out, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that hangs in the driver does not even die of this: it is left behind.
            child.communicate(timeout=0.2)
        return Output(124, f"no answer in {limit:.0f} s", timed_out=True)
    return Output(child.returncode, out[:MAX_TEXT])


def _read(path: str) -> str | None:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_TEXT)
    except OSError:
        return None


_CONNECT = 5.0
"""Seconds for a TCP connection; a name that resolves slowly is caught by the check's own limit."""


def _reach(host: str, port: int) -> str:
    started = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=_CONNECT):
            return ""
    except socket.gaierror:
        return "its name does not resolve"
    except TimeoutError:
        return f"no answer in {time.monotonic() - started:.0f} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
