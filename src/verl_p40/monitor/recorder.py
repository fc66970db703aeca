"""Puts samples into the folder of the run that they belong to."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from verl_p40.monitor import heartbeat, tables
from verl_p40.monitor.csvlog import CsvLog
from verl_p40.monitor.refusal import FORBIDDEN, refusal
from verl_p40.monitor.sample import Sample
from verl_p40.train.folder import RunFolder

Note = Callable[[str], None]

LOCK_NAME = ".monitor.lock"


class Recorder:
    """Writes each sample and, when it is where it belongs, the heartbeat.

    A sample that cannot be written for now (a full disk, a folder that has just gone) is dropped,
    with a note at the first and when it works again.
    """

    def __init__(self, runs_dir: Path, note: Note, interval: float = 1.0) -> None:
        self._runs_dir, self._note, self._interval = runs_dir, note, interval
        self._book: _Book | None = None
        self._dropped = 0
        self.samples = 0
        self.errors = 0

    def record(self, sample: Sample) -> None:
        """Write one sample.

        Raises:
            MachineError: this user may not write there.
        """
        run = sample.active.run if sample.active else None
        self._turn_to(run)
        try:
            if self._book is not None:
                if not self._book.write(sample):
                    return
                self.samples += 1
            self._beat(run)
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise refusal("write", run.path if run else self._runs_dir, error) from error
            self._drop(run, error)
            return
        if self._dropped:
            self._note(f"writing again: {self._dropped} samples were dropped")
            self._dropped = 0

    def close(self) -> None:
        if self._book is not None:
            self._book.close()
            self._book = None

    def _turn_to(self, run: RunFolder | None) -> None:
        if self._book is not None and (run is None or self._book.run.path != run.path):
            self.close()
        if self._book is None and run is not None:
            self._book = _Book(run, self._note)

    def _beat(self, run: RunFolder | None) -> None:
        name = run.name if run else None
        try:
            heartbeat.write(
                self._runs_dir,
                run=name,
                samples=self.samples,
                errors=self.errors,
                interval=self._interval,
            )
        except FileNotFoundError:
            # No run has ever been started here; the folder is not ours to make.
            if run is not None:
                raise

    def _drop(self, run: RunFolder | None, error: OSError) -> None:
        self.errors += 1
        if run is None:
            return
        if not self._dropped:
            self._note(f"{run.path} cannot be written ({error.strerror}): samples are dropped")
        self._dropped += 1


class _Book:
    """The tables of one run, written by one monitor at a time."""

    def __init__(self, run: RunFolder, note: Note) -> None:
        self.run, self._note = run, note
        self._lock: int | None = None
        self._told = False
        self._gpu = CsvLog(run.path / tables.GPU_FILE, tuple(tables.GPU_COLUMNS))
        self._host = CsvLog(run.path / tables.HOST_FILE, tuple(tables.HOST_COLUMNS))

    def write(self, sample: Sample) -> bool:
        """False when another monitor writes this run's tables."""
        if not self._mine():
            if not self._told:
                self._note(f"another monitor writes {self.run.path}: this one only shows")
                self._told = True
            return False
        if sample.gpus:
            self._gpu.append(tables.gpu_rows(sample))
        self._host.append(tables.host_rows(sample))
        return True

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _mine(self) -> bool:
        if self._lock is not None:
            return True
        path = self.run.path / LOCK_NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self._lock = fd
        return True
