"""The trainer's processes: started so that none outlives the supervisor, and ended as a tree.

supervisor -> guard -> trainer -> Ray's processes. The trainer dies with the guard and the guard
hears of the supervisor's death (``PR_SET_PDEATHSIG``); what is orphaned becomes the guard's child,
or the supervisor's (``PR_SET_CHILD_SUBREAPER``), which end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

RAY_TMP_PREFIX = "vp40-"
_SOCKET_ROOM = 40
"""Longest folder to put Ray's session in: ``<dir>/vp40-xxxxxxxx/session_<date>_<pid>/sockets/
plasma_store`` has to stay within the 107 bytes of a Unix socket's name."""


def become_subreaper() -> None:
    """Make orphaned descendants children of this process (Linux; elsewhere nothing)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def send_me_when_parent_dies(number: int) -> None:
    """Ask the kernel for a signal at the parent's death (Linux; elsewhere nothing)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_with(parent: int) -> Callable[[], None]:
    """What a child of ``parent`` runs before its command, so that it never outlives it."""

    def prepare() -> None:
        send_me_when_parent_dies(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    cwd: Path,
    keep: int,
    grace: float,
) -> subprocess.Popen[bytes]:
    """Start the trainer behind its guard, in a session of their own, output appended to ``log``.

    Args:
        keep: a file descriptor that both hold as long as they live (the folder's lock).
        grace: seconds between SIGTERM and SIGKILL when the guard is asked to end the trainer.

    Must be called from the main thread: the kernel ties the death signal to the calling thread.
    """
    guard = [sys.executable, "-m", "verl_p40.train.guard"]
    with log.open("ab", buffering=0) as out:
        return subprocess.Popen(
            [*guard, str(os.getpid()), str(keep), str(grace), *command],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(keep,),
        )


def descendants() -> list[psutil.Process]:
    """Every process below this one."""
    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


def resident_bytes() -> int:
    """Resident memory of all descendants, in bytes. Shared pages count once a process."""
    total = 0
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def stop(child: subprocess.Popen[bytes], *, grace: float) -> None:
    """End the trainer: SIGTERM, which Ray's driver shuts its cluster down on, then SIGKILL.

    Args:
        grace: seconds between the two.
    """
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace)
    if child.poll() is None:
        child.kill()
        child.wait()


def sweep(*, patience: float = 5.0) -> list[int]:
    """End every descendant that is left, and reap it. Returns the pids that had to be killed."""
    deadline = time.monotonic() + patience
    while _living() and time.monotonic() < deadline:
        # Ray's processes are usually on their way out by themselves.
        time.sleep(0.1)
        _reap()
    killed = []
    for _ in range(50):
        living = _living()
        if not living:
            break
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.append(process.pid)
        time.sleep(0.1)
        _reap()
    return sorted(set(killed))


def _living() -> list[psutil.Process]:
    alive = []
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def make_ray_tmp() -> Path:
    """A short folder of this run's own for Ray: two Ray starts in one folder clash."""
    base = tempfile.gettempdir()
    if len(base) > _SOCKET_ROOM or not os.access(base, os.W_OK):
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix=RAY_TMP_PREFIX, dir=base))


def remove_ray_tmp(folder: str | Path) -> None:
    """Remove a folder that :func:`make_ray_tmp` made; anything else is left alone."""
    path = Path(folder)
    if path.name.startswith(RAY_TMP_PREFIX):
        shutil.rmtree(path, ignore_errors=True)


_ONE_STOP = 0.5
"""Seconds within which signals are one request: `timeout` and terminals send several at once."""


class Interrupt:
    """What signals to the supervisor have asked for. ``name`` is empty while none came."""

    name = ""
    again = False
    """Asked for once more: to stop at once. A second SIGHUP does not count: a closed terminal
    sends one and its shell another."""

    def __init__(self) -> None:
        self._first = 0.0
        self._terminals = [fd for fd in (0, 1, 2) if _is_terminal(fd)]

    @property
    def asked(self) -> bool:
        return bool(self.name)

    def note(self, number: int) -> None:
        """Take in a signal."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            self._leave_terminal()
        if not self.name:
            self.name, self._first = signal.Signals(number).name, now
        elif number != signal.SIGHUP and now - self._first > _ONE_STOP:
            self.again = True

    def _leave_terminal(self) -> None:
        """Writing to a closed terminal is an error, and the run has to be ended in order."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag, so that the run can be ended in order."""
    state = Interrupt()
    before = {s: signal.signal(s, lambda number, frame: state.note(number)) for s in _ASKING}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raising() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does: what was begun is undone."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
