"""Which run is active now."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_p40.monitor.refusal import FORBIDDEN, refusal
from verl_p40.train.folder import RunFolder

RECENT = 120.0
"""Seconds. A folder that no lock can be judged by is active while its files are that new."""


@dataclass(frozen=True)
class Active:
    """A run that goes on. ``held``: known by its lock, not guessed from its files' times."""

    run: RunFolder
    held: bool
    others: tuple[str, ...] = ()
    """Names of further runs that are held now."""


class Finder:
    """Looks for the active run, and stays with it while it goes on.

    Args:
        runs_dir: where run folders are; need not exist yet.
        only: the one run to follow; None for whichever is active.
    """

    def __init__(self, runs_dir: Path, only: RunFolder | None = None) -> None:
        self._runs_dir, self._only = runs_dir, only
        self._current: RunFolder | None = None
        self._free: dict[Path, tuple[int, int]] = {}

    def look(self) -> Active | None:
        """The active run; None when there is none.

        Raises:
            MachineError: the folder of runs may not be read by this user.
        """
        judged = [(run, self._locked(run)) for run in self._folders()]
        held = [run for run, locked in judged if locked]
        if held:
            names = {run.path: run for run in held}
            current = self._current.path if self._current else None
            chosen = names.get(current) if current else None
            if chosen is None:
                chosen = max(held, key=lambda run: _mtime(run.lock_file))
            others = tuple(sorted(run.name for run in held if run.path != chosen.path))
            self._current = chosen
            return Active(chosen, held=True, others=others)
        # A lock that is free says that the run has ended, however new its files are.
        recent = [(at, run) for run, locked in judged if locked is None and (at := _activity(run))]
        if recent:
            self._current = max(recent, key=lambda pair: pair[0])[1]
            return Active(self._current, held=False)
        self._current = None
        return None

    def _folders(self) -> Iterator[RunFolder]:
        if self._only is not None:
            yield self._only
            return
        try:
            with os.scandir(self._runs_dir) as entries:
                paths = [
                    Path(entry.path)
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir()
                ]
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise refusal("read", self._runs_dir, error) from error
            return
        for path in paths:
            yield RunFolder(path)

    def _locked(self, run: RunFolder) -> bool | None:
        """Whether somebody holds the run's lock; None where there is none to judge by.

        Looking takes a free lock for an instant, in which a run that starts would find it taken.
        So a lock that was found free is left alone until its holder has written to it: who takes
        it writes its process id.
        """
        try:
            found = run.lock_file.stat()
        except OSError:
            return None
        state = (found.st_ino, found.st_mtime_ns)
        if self._free.get(run.path) == state:
            return False
        locked = is_locked(run.lock_file)
        if locked is False:
            self._free[run.path] = state
        return locked


def _activity(run: RunFolder) -> float:
    """When a run's files changed last; 0.0 for not lately."""
    # Not gpu.csv and host.csv: they are this monitor's own.
    at = max(_mtime(path) for path in (run.log, run.metrics, run.events))
    return at if time.time() - at < RECENT else 0.0


def is_locked(lock_file: Path) -> bool | None:
    """Whether another process holds a lock file; None where that cannot be told.

    ``flock`` is the kernel's: it works across containers that share the file, whatever their PID
    namespaces. A shared lock is asked for, read-only, so that two that look do not see each other
    and another user's file can be judged.
    """
    try:
        fd = os.open(lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        os.close(fd)
    return False


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
