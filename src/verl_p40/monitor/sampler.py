"""One look at everything: the run, the GPUs, the machine, the run's processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from verl_p40.hardware.reader import NoGpu, Reader, open_reader
from verl_p40.hardware.sample import GpuSample, Reading
from verl_p40.monitor.finder import Active, Finder
from verl_p40.monitor.host import Host, shared_memory_used
from verl_p40.monitor.progress import Progress
from verl_p40.monitor.sample import Sample
from verl_p40.monitor.tree import Tree
from verl_p40.train.folder import RunFolder

Note = Callable[[str], None]


class Gpus:
    """Reads the GPUs; tries again, now and then, where nothing or nobody answers."""

    RETRY = 60.0

    def __init__(self, note: Note, cancelled: Callable[[], bool]) -> None:
        self._note, self._cancelled = note, cancelled
        self._reader: Reader | None = None
        self._tried = float("-inf")
        self._said: tuple[str, ...] = ("",)

    def read(self, now: float) -> tuple[GpuSample, ...]:
        if self._reader is None and now - self._tried >= self.RETRY:
            self._tried = now
            try:
                self._reader = open_reader(self._cancelled)
            except NoGpu as error:
                self._say((f"no GPU to sample ({error}): the machine alone is",))
        reading = self._reader.read() if self._reader else Reading(())
        if self._reader is not None:
            self._say(reading.problems, source=self._reader.source)
            silent = reading.problems and all(gpu.temperature_c is None for gpu in reading.gpus)
            if silent and now - self._tried >= self.RETRY:
                # Nobody answers: a driver that was reloaded needs a library opened anew.
                self.close()
                self._reader = None
        return reading.gpus

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _say(self, problems: tuple[str, ...], source: str = "") -> None:
        if problems == self._said:
            return
        for problem in problems:
            if problem not in self._said:
                self._note(problem)
        if not problems and self._said != ("",):
            self._note(f"the GPUs answer again ({source})")
        self._said = problems


class Sampler:
    """Takes samples.

    Args:
        only: the one run to follow; None for whichever is active.
        note: told, once each, what a user should know.
        cancelled: asked during whatever may take long.
    """

    def __init__(
        self,
        runs_dir: Path,
        only: RunFolder | None,
        note: Note,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._finder = Finder(runs_dir, only)
        self._host = Host(runs_dir)
        self._gpus = Gpus(note, cancelled)
        self._progress: Progress | None = None
        self._tree: Tree | None = None

    def take(self) -> Sample:
        now = time.monotonic()
        active = self._finder.look()
        self._attach(active)
        gpus = self._gpus.read(now)
        tree = self._tree.sample(now) if self._tree else None
        if active is None:
            shm = shared_memory_used()
        else:
            shm = shared_memory_used(tree.root) if tree else None
        return Sample(
            time=datetime.now(timezone.utc),
            active=active,
            run=self._progress.state() if self._progress else None,
            gpus=gpus,
            host=self._host.sample(),
            tree=tree,
            shm_used=shm,
            hidden=self._tree.hidden if self._tree and tree is None else "",
        )

    def close(self) -> None:
        self._gpus.close()

    def _attach(self, active: Active | None) -> None:
        if active is None:
            self._progress = self._tree = None
        elif self._progress is None or self._progress.run.path != active.run.path:
            self._progress = Progress(active.run)
            self._tree = Tree(active.run.lock_file)
