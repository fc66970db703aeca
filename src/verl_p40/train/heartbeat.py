"""``heartbeat.json`` of a run: what its supervisor is at, and since when it has got on.

Read by :mod:`verl_p40.health`. While data and model are being prepared there is no run folder yet;
the file then lies beside it, as ``<runs>/.<run>.preparing.json``, if ``<runs>`` exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_p40.health.check import PREPARING, pid_namespace
from verl_p40.train.folder import RunFolder, write_whole
from verl_p40.train.metrics import StepRow
from verl_p40.train.view import View

EVERY = 5.0
"""Seconds between two heartbeats while nothing changes."""
AT_MOST_EVERY = 2.0
"""Seconds between two heartbeats, however fast things change."""
RECENT = 20
"""Steps whose seconds are summed up."""


class Heartbeat:
    """Writes the file. A disk that is full does not end a run: the next beat may get through."""

    def __init__(self, path: Path, **always: Any) -> None:
        self._path = path
        self._always = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_namespace": pid_namespace() or "",
            **always,
        }
        self._progress = time.monotonic()
        self._next = 0.0

    @property
    def still(self) -> float:
        """Seconds since something got on."""
        return time.monotonic() - self._progress

    def progressed(self) -> None:
        """Something got on just now."""
        self._progress = time.monotonic()
        # The next beat tells it soon.
        self._next = min(self._next, time.monotonic() + AT_MOST_EVERY)

    def beat(self, *, now: bool = False, **what: Any) -> None:
        """Write ``what``, if it is time to or ``now`` is set."""
        clock = time.monotonic()
        if clock < self._next and not now:
            return
        self._next = clock + EVERY
        now_is = time.time()
        document = {
            "time": _iso(now_is),
            # By the clock of now: one that was set meanwhile makes nothing look stuck.
            "progress": _iso(now_is - self.still),
            **self._always,
            **what,
        }
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(document) + "\n")

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _iso(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds")


def step_seconds(rows: Sequence[StepRow]) -> dict[str, float]:
    """Median and longest of the last steps, whole: with validation and saving, in seconds."""
    seconds = [row.seconds for row in rows if row.seconds is not None][-RECENT:]
    if not seconds:
        return {}
    return {
        "median_step_seconds": round(statistics.median(seconds), 3),
        "slowest_step_seconds": round(max(seconds), 3),
    }


class PreparingView:
    """A view that is told of every progress, and passes it on as a heartbeat."""

    def __init__(self, view: View, heartbeat: Heartbeat) -> None:
        self._view, self._heartbeat = view, heartbeat
        self._phase = ""
        self.patience = view.patience

    def note(self, text: str) -> None:
        self._got_on(self._phase)
        self._view.note(text)

    def phase(self, text: str) -> None:
        self._got_on(text)
        self._view.phase(text)

    def step(self, row: StepRow, *, total: int | None, rss: int) -> None:
        self._view.step(row, total=total, rss=rss)

    def tick(self, *, rss: int) -> None:
        self._view.tick(rss=rss)

    def close(self) -> None:
        self._view.close()

    def _got_on(self, phase: str) -> None:
        # "downloading: 3 of 9 files" goes on being the same work.
        another = phase.split(":")[0] != self._phase.split(":")[0]
        self._phase = phase
        self._heartbeat.progressed()
        self._heartbeat.beat(state="preparing", phase=phase, now=another)


@contextmanager
def preparing(run: RunFolder, view: View) -> Iterator[View]:
    """A view to prepare ``run`` under; its heartbeat ends with the block."""
    if not run.path.parent.is_dir():
        yield view
        return
    heartbeat = Heartbeat(run.path.with_name(f".{run.name}{PREPARING}"), run=run.name)
    try:
        yield PreparingView(view, heartbeat)
    finally:
        heartbeat.remove()
