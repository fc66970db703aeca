"""The attempts at one run, under its folder's lock: start, follow, and go on after a failure."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_p40.stack.env import StackEnv
from verl_p40.train import (
    checkpoints,
    envinfo,
    environ,
    hubmodels,
    ladder,
    process,
    stopping,
)
from verl_p40.train.compose import Config, select, to_yaml
from verl_p40.train.ending import note_end
from verl_p40.train.folder import file_text, write_whole
from verl_p40.train.heartbeat import Heartbeat
from verl_p40.train.ladder import Rung
from verl_p40.train.metrics import cut_after
from verl_p40.train.recovery import Again, Recovery, Stop
from verl_p40.train.runspec import RunSpec, go_on
from verl_p40.train.supervise import Attempt, Outcome, supervise
from verl_p40.train.view import View, clock
from verl_p40.tripwire import record


@dataclass(frozen=True)
class Ready:
    """What an attempt starts from. ``report`` is :mod:`verl_p40.train.inside`'s."""

    stack: StackEnv
    patch_digest: str
    models: hubmodels.Folders
    report: Mapping[str, Any]
    total: int


@dataclass(frozen=True)
class Result:
    """How the last attempt ended, how many there were, and the rungs that it ran on.

    ``why`` says why there was no other one, where the failure alone does not.
    """

    outcome: Outcome
    attempts: int
    rungs: tuple[Rung, ...]
    why: str = ""


@dataclass(frozen=True)
class Attempts:
    """All attempts of one command at ``spec``'s run. ``lock`` is the folder's, held."""

    spec: RunSpec
    ready: Ready
    lock: int
    grace: float
    view: View
    interrupt: process.Interrupt

    @property
    def _config(self) -> Config:
        """The run's, models of the hub given by their folders."""
        return hubmodels.substituted(self.spec.config, self.ready.models)

    def run(self, retries: int) -> Result:
        """Until the run is finished, stopped, or fails in a way that trying again cannot mend."""
        spec, number = self.spec, 1
        recovery = Recovery(retries)
        rungs = ladder.stored(spec.run.read_env()) if spec.action != "start" else ()
        for rung in rungs:
            self.view.note(f"memory ran out before, so: {rung.what}")
        spec, skipped = go_on(spec, self._config)
        while True:
            outcome = self._one(spec, rungs, skipped)
            if outcome.status != "failed":
                return Result(outcome, number, rungs)
            verdict = recovery.decide(
                outcome, spec.step, functools.partial(self._lower, rungs, outcome)
            )
            if isinstance(verdict, Stop):
                return Result(outcome, number, rungs, verdict.why)
            if verdict.rung is not None:
                rungs = (*rungs, verdict.rung)
            self._tell(outcome, verdict)
            if not self._wait(verdict.wait, outcome):
                stopped = replace(outcome, status="interrupted", signal=self.interrupt.name)
                note_end(spec.run, stopped)
                return Result(stopped, number, rungs)
            spec, skipped = go_on(spec, self._config)
            if spec.action == "finished":
                # It died between its last checkpoint and its end.
                done = replace(outcome, status="finished", failure=None)
                note_end(spec.run, done)
                return Result(done, number, rungs)
            number += 1

    def _lower(self, rungs: Sequence[Rung], outcome: Outcome) -> Rung | None:
        if outcome.failure is None:
            return None
        return ladder.next_rung(self._config, rungs, outcome.failure, outcome.phase)

    def _tell(self, outcome: Outcome, verdict: Again) -> None:
        """Cause and fix, and what is done now, on the screen and in the run's events."""
        view, failure = self.view, outcome.failure
        assert failure is not None
        at = f"after step {outcome.step}" if outcome.step else "before the first step"
        view.note(f"failed while {outcome.phase}, {at} ({outcome.exit_text}): {failure.headline}")
        for line in failure.known:
            view.note(f"  {line}")
        details: dict[str, Any] = {"wait": verdict.wait, "cause": failure.kind or None}
        if verdict.rung is not None:
            details["ladder"] = verdict.rung.document()
            view.note(f"going on with less memory: {verdict.rung.what} ({verdict.rung.cost})")
            view.note(f"  {' '.join(verdict.rung.overrides)}")
        else:
            view.note(f"trying again in {verdict.wait:.0f} s")
        self.spec.run.add_event("retry", step=outcome.step, **details)

    def _wait(self, seconds: float, outcome: Outcome) -> bool:
        """False when a signal came meanwhile."""
        heartbeat = Heartbeat(self.spec.run.heartbeat, run=self.spec.run.name)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.interrupt.asked:
            phase = f"waiting to try again: {clock(left)}"
            self.view.phase(phase)
            self.view.tick(rss=0)
            heartbeat.progressed()
            heartbeat.beat(
                state="training",
                phase=phase,
                stepping=False,
                step=outcome.step,
                total=outcome.total,
            )
            time.sleep(min(0.2, left))
        return not self.interrupt.asked

    def _one(
        self, spec: RunSpec, rungs: Sequence[Rung], skipped: Sequence[checkpoints.Skipped]
    ) -> Outcome:
        """Write what belongs in the folder, start, follow, and note the end."""
        run, ready = spec.run, self.ready
        stack, total = ready.stack, ready.total
        ray_tmp = process.make_ray_tmp()
        added = environ.additions(
            spec.composed.about,
            run,
            ray_tmp=ray_tmp,
            chained=spec.chained,
            device=spec.device,
            count=spec.cards,
            rollout=spec.rollout,
        )
        extra = ladder.overrides(rungs)
        command = spec.command(stack.python, *hubmodels.overrides(ready.models), *extra)
        try:
            process.remove_ray_tmp(str(run.read_env().get("ray_tmp", "")))
            _set_back(spec, skipped, self.view)
            write_whole(run.config, _config_text(spec))
            document = envinfo.collect(
                preset=spec.composed.preset,
                overrides=spec.composed.overrides,
                digest=spec.digest,
                command=command,
                environ=added,
                stack=stack,
                patch_digest=ready.patch_digest,
                versions=ready.report["versions"],
                ray_tmp=ray_tmp,
            )
            document["preset_source"] = spec.composed.source
            document["rows"] = int(ready.report["rows"])
            document["total_steps"] = total
            document["ladder"] = [rung.document() for rung in rungs]
            write_whole(run.env, file_text(document))
            _head(spec, command)
            kind = "resume" if spec.action == "resume" else "start"
            run.add_event(kind, step=spec.step, total=total, pid=os.getpid(), settings=extra)
            attempt = Attempt(
                run=run,
                command=command,
                environ=environ.apply(stack.environ(), added),
                cwd=Path.cwd(),
                lock=self.lock,
                total=total,
                from_step=spec.step,
                tripwire=spec.tripwire,
                stop=stopping.OrderlyStop(
                    file=stopping.file_in(ray_tmp), grace=self.grace, saves=_saves(spec)
                ),
                val_only=bool(select(spec.config, "trainer.val_only")),
            )
            outcome = supervise(attempt, self.view, self.interrupt)
            note_end(run, outcome)
            return outcome
        finally:
            process.remove_ray_tmp(ray_tmp)


def _saves(spec: RunSpec) -> bool:
    """Whether verl writes checkpoints in this run."""
    frequency = int(select(spec.config, "trainer.save_freq") or -1)
    return frequency > 0 and not select(spec.config, "trainer.val_only")


def _set_back(spec: RunSpec, skipped: Sequence[checkpoints.Skipped], view: View) -> None:
    """Bring the folder to the step it goes on from, and say so."""
    run = spec.run
    record.clear(run.path)
    if spec.action == "start":
        view.note(f"starting {run.path}")
        return
    for each in skipped:
        gone = "removed" if each.half else f"kept as global_step_{each.step}{checkpoints.ASIDE}"
        view.note(
            f"warning: the checkpoint of step {each.step} cannot be used, and is {gone}: "
            f"{each.problem}"
        )
        run.add_event("skipped", step=each.step, problem=each.problem, half=each.half)
    aside = [each.step for each in skipped if not each.half]
    keep = select(spec.config, "trainer.max_actor_ckpt_to_keep")
    step = spec.step if spec.action == "resume" else None
    checkpoints.prepare_resume(run.checkpoints, step, keep=int(keep) if keep else None, aside=aside)
    dropped = cut_after(run.metrics, spec.step if step is not None else -1)
    total = run.read_env().get("total_steps")
    if spec.action == "restart":
        done = f" (it had reached step {dropped})" if dropped else ""
        view.note(f"{run.path} has no checkpoint to go on from{done}: starting over")
        return
    again = f"; steps {step + 1 if step else 1}-{dropped} are done again" if dropped else ""
    wanted = select(spec.config, "trainer.total_training_steps") or total
    view.note(f"resuming {run.path} from step {spec.step} of {wanted}{again}")


def _config_text(spec: RunSpec) -> str:
    head = (
        f"# The whole config of this run, resolved, from preset {spec.composed.preset}.\n"
        f"# Overrides: {' '.join(spec.composed.overrides) or 'none'}\n"
    )
    return head + to_yaml(spec.config)


def _head(spec: RunSpec, command: tuple[str, ...]) -> None:
    """A line in train.log where an attempt begins."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with spec.run.log.open("a", encoding="utf-8") as log:
        log.write(f"=== verl-p40 {now} {spec.action} at step {spec.step}: {' '.join(command)}\n")
