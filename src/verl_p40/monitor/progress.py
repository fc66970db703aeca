"""How far a run is: its last step, read from the files it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_p40.train import metrics
from verl_p40.train.folder import RunFolder


@dataclass(frozen=True)
class RunState:
    """A run at one time. ``step`` is the last one that was trained, 0 before the first."""

    name: str
    step: int
    total: int | None
    reward: float | None
    kl: float | None
    seconds_per_step: float | None


class Progress:
    """Follows one run's ``metrics.jsonl``."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._tail = metrics.Tail(run.metrics)
        self._inode = 0
        self._step, self._data = -1, dict[str, Any]()
        self._row: metrics.StepRow | None = None
        self._total: int | None = None

    def state(self) -> RunState:
        self._follow()
        if self._total is None:
            total = self.run.read_env().get("total_steps")
            self._total = total if isinstance(total, int) else None
        row = self._row
        return RunState(
            name=self.run.name,
            step=row.step if row else 0,
            total=self._total,
            reward=row.reward if row else None,
            kl=row.kl if row else None,
            seconds_per_step=row.seconds if row else None,
        )

    def _follow(self) -> None:
        try:
            found = self.run.metrics.stat()
        except OSError:
            return
        if found.st_ino != self._inode or found.st_size < self._tail.offset:
            # A run that goes on from a checkpoint replaces the file by a shorter one.
            self._tail.close()
            self._inode, self._tail = found.st_ino, metrics.Tail(self.run.metrics)
            self._step, self._row = -1, None
        if found.st_size == self._tail.offset:
            return
        for line in self._tail.lines():
            parsed = metrics.parse(line)
            if parsed is None:
                continue
            step, data = parsed
            # A step's validation is a record of its own.
            self._data = {**self._data, **data} if step == self._step else data
            self._step = step
            row = metrics.row(step, self._data)
            if row.trained:
                self._row = row


def ending(run: RunFolder) -> str:
    """How a run's last attempt ended, for people."""
    for event in reversed(run.read_events()):
        if event["event"] == "end":
            return f"finished at step {event.get('step')}"
        if event["event"] == "failure":
            status = event.get("status", "failed")
            reason = event.get("error") or ("" if status == "interrupted" else event.get("exit"))
            return f"{status} at step {event.get('step')}" + (f": {reason}" if reason else "")
        if event["event"] == "stopped":
            return f"stopped at step {event.get('step')}"
        if event["event"] in ("start", "resume"):
            break
    return "ended without saying how"
