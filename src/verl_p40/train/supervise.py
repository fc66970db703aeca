"""One attempt at a run: start the trainer, follow it, and say how it ended."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from verl_p40.health.check import clock, step_limit
from verl_p40.train import checkpoints, process
from verl_p40.train.failures import DISK_FULL, Failure, describe_exit, explain
from verl_p40.train.folder import RunFolder
from verl_p40.train.heartbeat import RECENT, Heartbeat, step_seconds
from verl_p40.train.metrics import History, StepRow, Tail
from verl_p40.train.phases import Phases
from verl_p40.train.stopping import OrderlyStop
from verl_p40.train.view import View
from verl_p40.tripwire import record

Status = Literal["finished", "failed", "tripped", "interrupted"]

GRACE = 20.0
"""Seconds that the trainer has to end by itself after SIGTERM."""
HANG = 4
"""Times health's limit after which a trainer is ended: whoever watches health is told before."""
_POLL = 0.2
_NO_ROOM = 1 << 20
"""Bytes of free disk below which a write of the trainer may have failed: its last buffer's."""
_MEMORY_EVERY = 2.0


@dataclass(frozen=True)
class Attempt:
    """What to start. ``total`` is the planned last step, ``from_step`` the step resumed from."""

    run: RunFolder
    command: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    lock: int
    total: int | None
    from_step: int
    tripwire: bool
    stop: OrderlyStop
    val_only: bool = False


@dataclass(frozen=True)
class Outcome:
    """How the attempt ended. ``history`` is the whole run's; ``seconds`` this attempt's.

    ``checkpoint`` is the step of the newest checkpoint, None where there is none; ``signal`` the
    signal that asked for the end.
    """

    status: Status
    history: History
    total: int | None
    seconds: float
    phase: str
    exit_text: str = ""
    signalled: bool = False
    """The trainer died of a signal that was not ours."""
    failure: Failure | None = None
    trip: record.Trip | None = None
    operators: int = 0
    """Operators that the tripwire has checked; 0 without one."""
    checkpoint: int | None = None
    signal: str = ""

    @property
    def step(self) -> int:
        return self.history.last_step


class _Follower:
    """Reads what the trainer writes and passes it on."""

    def __init__(self, attempt: Attempt, view: View) -> None:
        self.attempt, self.view = attempt, view
        run = attempt.run
        self.history = History.read(run.metrics)
        size = run.metrics.stat().st_size if run.metrics.exists() else 0
        self.metrics = Tail(run.metrics, size)
        self.log = Tail(run.log, run.log.stat().st_size if run.log.exists() else 0)
        self.phases = Phases()
        self.saved = checkpoints.tracked(run.checkpoints)
        self.rss = 0
        self._memory_read = 0.0
        self._recent: deque[StepRow] = deque(maxlen=RECENT)
        self._heartbeat = Heartbeat(run.heartbeat, run=run.name, from_step=attempt.from_step)

    @property
    def total(self) -> int | None:
        return self.phases.total or self.attempt.total

    def drain(self) -> None:
        """Take in everything new."""
        now = time.monotonic()
        if now - self._memory_read > _MEMORY_EVERY:
            self._memory_read, self.rss = now, process.resident_bytes()
        for line in self.log.lines():
            if self.phases.feed(line):
                self._heartbeat.progressed()
        for row in self.history.extend(self.metrics.lines()):
            self._heartbeat.progressed()
            self._step(row)
        saved = checkpoints.tracked(self.attempt.run.checkpoints)
        if saved is not None and saved != self.saved:
            self.saved = saved
            self.attempt.run.add_event("checkpoint", step=saved)
            checkpoints.remove_husks(self.attempt.run.checkpoints)
        self.view.phase(self.attempt.stop.banner or self.phases.current)
        self.view.tick(rss=self.rss)
        self.beat("training")

    def beat(self, state: str, *, now: bool = False) -> None:
        """Tell whoever looks at the run folder. ``state``: training, or how it ended."""
        self._heartbeat.beat(
            now=now,
            state=state,
            phase=self.attempt.stop.banner or self.phases.current,
            stepping=self.phases.stepping,
            step=self.history.last_step,
            total=self.total,
            **step_seconds(self._recent),
        )

    def hangs(self) -> str:
        """In words, when nothing has got on for much longer than health allows; else empty."""
        seconds = step_seconds(self._recent)
        limit = HANG * step_limit(
            seconds.get("median_step_seconds", 0.0), seconds.get("slowest_step_seconds", 0.0)
        )
        if self._heartbeat.still <= limit:
            return ""
        return f"the trainer hangs: it has not got on for {clock(limit)}"

    def _step(self, row: StepRow) -> None:
        if row.accuracy is not None:
            self.attempt.run.add_event("validation", step=row.step, accuracy=row.accuracy)
        if row.trained:
            self.phases.step_done()
            self._recent.append(row)
        self.view.step(row, total=self.total, rss=self.rss)

    def attempt_log(self) -> str:
        return self.log.all().decode("utf-8", "replace")

    def close(self) -> None:
        self.metrics.close()
        self.log.close()


def supervise(attempt: Attempt, view: View, interrupt: process.Interrupt) -> Outcome:
    """Run the trainer to its end, whatever that is, and leave no process behind."""
    began = time.monotonic()
    follower = _Follower(attempt, view)
    process.become_subreaper()
    child = process.start(
        attempt.command,
        env=attempt.environ,
        log=attempt.run.log,
        cwd=attempt.cwd,
        keep=attempt.lock,
        grace=GRACE,
    )
    unarmed = ended_by_us = False
    hangs = ""
    try:
        while child.poll() is None and not unarmed and not hangs:
            follower.drain()
            unarmed = _unarmed(attempt, follower)
            hangs = follower.hangs()
            if attempt.stop.is_over(interrupt, stepping=follower.phases.stepping, view=view):
                break
            time.sleep(_POLL)
        ended_by_us = child.poll() is None
        if ended_by_us:
            view.phase(f"stopping ({interrupt.name or hangs or 'the tripwire is not armed'})")
        # The guard needs a moment more than it gives the trainer.
        process.stop(child, grace=GRACE + 15)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        process.sweep()
    follower.drain()
    full = _is_full(attempt.run.path)
    # What a full disk needs most.
    checkpoints.remove_partial(attempt.run.checkpoints)
    code = int(child.returncode)
    trip = record.read_trip(attempt.run.path)
    status, failure = _judge(code, trip, interrupt, follower, unarmed, hangs, ended_by_us, full)
    if failure is not None and failure.headline == DISK_FULL:
        _note(attempt.run.log, failure)
    follower.beat(status, now=True)
    follower.close()
    return Outcome(
        status=status,
        history=follower.history,
        total=follower.total,
        seconds=time.monotonic() - began,
        phase=follower.phases.current,
        exit_text=describe_exit(code),
        signalled=code < 0 and not ended_by_us,
        failure=failure,
        trip=trip,
        operators=record.operators(attempt.run.path) if attempt.tripwire else 0,
        checkpoint=checkpoints.tracked(attempt.run.checkpoints),
        signal=interrupt.name,
    )


def _is_full(folder: Path) -> bool:
    """Whether nothing more can be written where the log and the checkpoints are."""
    try:
        return shutil.disk_usage(folder).free < _NO_ROOM
    except OSError:
        return False


def _note(log: Path, failure: Failure) -> None:
    """Say in the log why it ends there, for whoever reads it later, `verl-p40 diagnose` first."""
    # There may be no room for this either.
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as out:
        out.write(f"\n{failure.headline}\n")


def _unarmed(attempt: Attempt, follower: _Follower) -> bool:
    """True when a step was trained though the tripwire was asked for and no worker has it."""
    return (
        attempt.tripwire
        and follower.history.last_step > attempt.from_step
        and not record.armed(attempt.run.path)
    )


def _judge(
    code: int,
    trip: record.Trip | None,
    interrupt: process.Interrupt,
    follower: _Follower,
    unarmed: bool,
    hangs: str,
    ended_by_us: bool,
    full: bool,
) -> tuple[Status, Failure | None]:
    if trip is not None:
        return "tripped", None
    if unarmed:
        text = "the tripwire was asked for, and no worker armed it"
        return "failed", Failure(text, ())
    if interrupt.asked and ended_by_us:
        return "interrupted", None
    if hangs and ended_by_us:
        found = explain(follower.attempt_log())
        return "failed", replace(found, headline=hangs, kind="hang")
    if code != 0:
        found = explain(follower.attempt_log(), full=full)
        if code < 0 and not found.kind:
            # Nobody writes of his own kill.
            found = replace(found, headline=f"the trainer was {describe_exit(code)}", kind="killed")
        return "failed", found
    total, step = follower.total, follower.history.last_step
    if follower.attempt.val_only:
        done = bool(follower.history.rows())
    else:
        done = step > 0 and (total is None or step >= total)
    if done:
        return "finished", None
    if interrupt.asked:
        return "interrupted", None
    return "failed", Failure(f"verl ended without an error at step {step} of {total}", ())
