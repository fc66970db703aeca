"""The loop: sample, write, show, wait."""

from __future__ import annotations

import time
from pathlib import Path

from verl_p40.monitor.finder import Active
from verl_p40.monitor.progress import ending
from verl_p40.monitor.recorder import Recorder
from verl_p40.monitor.sampler import Sampler
from verl_p40.monitor.stopping import Stop
from verl_p40.monitor.view import View
from verl_p40.train.folder import RunFolder


def watch(
    runs_dir: Path,
    only: RunFolder | None,
    view: View,
    stop: Stop,
    *,
    interval: float,
    write: bool,
) -> None:
    """Sample until asked to stop.

    Args:
        only: the one run to follow; None for whichever is active.
        interval: seconds between two samples. One that is late is not made up for.
        write: False only shows.

    Raises:
        MachineError: a folder may not be written by this user.
    """
    sampler = Sampler(runs_dir, only, view.note, stop.is_asked)
    recorder = Recorder(runs_dir, view.note, interval) if write else None
    news = _News(view, runs_dir, only)
    due = time.monotonic()
    try:
        while not stop.asked:
            sample = sampler.take()
            if stop.asked:
                return
            news.tell(sample.active, sample.hidden)
            if recorder is not None:
                recorder.record(sample)
            view.show(sample)
            due = max(due + interval, time.monotonic())
            stop.wait(due - time.monotonic())
    finally:
        sampler.close()
        if recorder is not None:
            recorder.close()


class _News:
    """Says, once each, when a run begins and ends, and what cannot be seen of it."""

    def __init__(self, view: View, runs_dir: Path, only: RunFolder | None) -> None:
        self._view, self._runs_dir, self._only = view, runs_dir, only
        self._run: RunFolder | None = None
        self._waiting = False
        self._hidden = ""

    def tell(self, active: Active | None, hidden: str) -> None:
        run = active.run if active else None
        if self._run is not None and (run is None or run.path != self._run.path):
            self._view.note(f"{self._run.name} {ending(self._run)}")
        if run is not None and (self._run is None or run.path != self._run.path):
            others = (
                f" (also running: {', '.join(active.others)})" if active and active.others else ""
            )
            self._view.note(f"following {run.path}{others}")
            self._hidden = ""
        if run is None and not self._waiting:
            what = f"{self._only.path} is not running" if self._only else self._nothing()
            self._view.note(f"{what}: waiting")
        if hidden and hidden != self._hidden:
            self._view.note(f"its processes are not visible: {hidden}")
            self._hidden = hidden
        self._run, self._waiting = run, run is None

    def _nothing(self) -> str:
        if not self._runs_dir.is_dir():
            return f"there is no folder {self._runs_dir} yet"
        return f"no run in {self._runs_dir} is active"
