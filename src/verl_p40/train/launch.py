"""``verl-p40 train`` from end to end: what to run, preflight, attempt, summary."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_p40.data import prepare
from verl_p40.errors import DataError, TrainingError, TripwireError
from verl_p40.stack import env as stack_env
from verl_p40.stack.env import StackEnv
from verl_p40.train import (
    checks,
    environ,
    heartbeat,
    hubmodels,
    inside,
    process,
    recovery,
    room,
    source,
    stopping,
)
from verl_p40.train.attempts import Attempts, Ready, Result
from verl_p40.train.compose import select
from verl_p40.train.ladder import Rung
from verl_p40.train.metrics import History, StepRow
from verl_p40.train.preparation import DataProgress, ViewReport
from verl_p40.train.runspec import Request, RunSpec, make_runspec, python_version, stored_request
from verl_p40.train.supervise import Outcome
from verl_p40.train.view import View

Say = Callable[[str], None]


@dataclass(frozen=True)
class Summary:
    """How a run stands at the end of a command."""

    spec: RunSpec
    outcome: Outcome | None
    """None for a run that was finished already."""
    rows: tuple[StepRow, ...]
    total: int | None
    attempts: int = 0
    rungs: tuple[Rung, ...] = ()

    def document(self) -> dict[str, Any]:
        """The ``--json`` document."""
        reward, accuracy = self.reward(), self.accuracy()
        return {
            "run": str(self.spec.run.path),
            "status": self.outcome.status if self.outcome else "already finished",
            "action": self.spec.action,
            "from_step": self.spec.step,
            "step": self.rows[-1].step if self.rows else 0,
            "total_steps": self.total,
            "checkpoint": self.outcome.checkpoint if self.outcome else None,
            "reward": {"from": reward[0], "to": reward[1]} if reward else None,
            "accuracy": {"from": accuracy[0], "to": accuracy[1]} if accuracy else None,
            "seconds": round(self.outcome.seconds, 3) if self.outcome else 0,
            "attempts": self.attempts,
            "ladder": [rung.document() for rung in self.rungs],
            "tripwire_operators": self.outcome.operators if self.outcome else 0,
            "log": str(self.spec.run.log),
            "metrics": str(self.spec.run.metrics),
            "resume": self.resume(),
            "extend": self.extend(),
        }

    def reward(self) -> tuple[float, float] | None:
        """Mean reward over the first and the last steps (three of each: one step is noisy)."""
        values = [r.reward for r in self.rows if r.reward is not None]
        if not values:
            return None
        few = min(3, len(values))
        return sum(values[:few]) / few, sum(values[-few:]) / few

    def accuracy(self) -> tuple[float, float] | None:
        values = [r.accuracy for r in self.rows if r.accuracy is not None]
        return (values[0], values[-1]) if values else None

    def resume(self) -> str:
        return self.spec.user_command()

    def extend(self) -> str:
        steps = (self.total or (self.rows[-1].step if self.rows else 0)) * 2
        return self.spec.user_command(f"trainer.total_training_steps={steps}")


def dry_run(request: Request, say: Say) -> tuple[RunSpec, dict[str, Any]]:
    """The spec, and ``{preset, run, action, command, env, warnings, notes, config}``. Starts nothing."""
    spec = resolve_run(request, say)
    prefix = stack_env.adopted()
    python = prefix.python if prefix else _planned_prefix(spec) / "bin" / "python"
    added = environ.additions(
        spec.composed.about,
        spec.run,
        ray_tmp=Path(tempfile.gettempdir()) / f"{process.RAY_TMP_PREFIX}XXXXXXXX",
        chained=spec.chained,
        device=spec.device,
        count=spec.cards,
        rollout=spec.rollout,
    )
    return spec, {
        "preset": spec.composed.preset,
        "run": str(spec.run.path),
        "action": spec.action,
        "from_step": spec.step,
        "command": list(spec.command(python, *hubmodels.overrides(hubmodels.present(spec.config)))),
        "env": added,
        "warnings": list(spec.warnings),
        "notes": list(spec.notes),
        "config": spec.config,
    }


def resolve_run(request: Request, say: Say) -> RunSpec:
    """Compose and check, with the verl of the installed stack or the pinned wheel's config."""
    return make_runspec(stored_request(request), source.config_folder(_any_stack(), say))


def _any_stack() -> StackEnv | None:
    found = stack_env.adopted()
    if found is None:
        found = stack_env.read_env(stack_env.prefix_for("cpu", python_version()))
    return found


def _planned_prefix(spec: RunSpec) -> Path:
    return stack_env.prefix_for(spec.flavor, python_version())


def train(request: Request, view: View) -> Summary:
    """Train until the run is finished, failed or interrupted.

    Raises:
        UsageError, MachineError, DataError, TreeError, DiskError, BusyError: before the start.
        TrainingError, TripwireError: the trainer ended in an error.
        KeyboardInterrupt: stopped by a signal; the run can be resumed.
    """
    with process.raising():
        return _train(request, view)


def _train(request: Request, view: View) -> Summary:
    grace, retries = stopping.grace(), recovery.retries(request.retries)
    checks.check_limits()
    view.phase("composing the config")
    spec = resolve_run(request, view.note)
    for warning in spec.warnings:
        view.note(f"warning: {warning}")
    for note in spec.notes:
        view.note(note)
    checks.check_device(spec.config, spec.composed.preset)
    environ.check_allocator(spec.rollout)
    if spec.action == "finished":
        return _finished(spec)
    _ask_doctor(spec, view)
    with heartbeat.preparing(spec.run, view) as telling:
        ready = _prepare(spec, telling)
    with process.interruptible() as interrupt, spec.run.hold() as lock:
        result = Attempts(spec, ready, lock, grace, view, interrupt).run(retries)
    return _conclude(spec, result)


_DOCTORED = ("gpu",)
"""The groups of doctor's checks that tell of cards that a run would fail on."""


def _ask_doctor(spec: RunSpec, view: View) -> None:
    """Say what doctor finds wrong in seconds. A run goes on all the same: it may know better."""
    if spec.device == "cpu":
        return
    from verl_p40 import doctor

    view.phase("looking at the cards")
    for report in doctor.fast(_DOCTORED):
        view.note(f"warning: {report.check.title}: {report.outcome.text}")
        for fix in report.outcome.fix:
            view.note(f"  {fix}")


def _prepare(spec: RunSpec, view: View) -> Ready:
    """Stack, data and model, made sure of and checked. Nothing is in the run folder yet."""
    stack = _ensure_stack(spec, view)
    patch_digest = source.check_tree(stack)
    _ensure_data(spec, stack, view)
    models = hubmodels.ensure(spec.config, stack, view)
    config = hubmodels.substituted(spec.config, models)
    view.phase("checking model and data")
    report = preflight(stack, config)
    rows = int(report["rows"])
    checks.check_steps(spec.config, rows)
    total = checks.planned_steps(spec.config, rows)
    checks.check_disk(config, spec.run.path, total - spec.step)
    for warning in room.check_room(config, spec.composed.preset):
        view.note(f"warning: {warning}")
    return Ready(stack, patch_digest, models, report, total)


def _ensure_stack(spec: RunSpec, view: View) -> StackEnv:
    view.phase("making sure of the training stack")
    return stack_env.ensure(spec.flavor, report=ViewReport(view))


def _ensure_data(spec: RunSpec, stack: StackEnv, view: View) -> None:
    """Make the preset's data, unless the config has been pointed elsewhere altogether."""
    kind = spec.composed.about.data
    if kind == "none":
        return
    wanted = [
        select(spec.config, "data.train_files"),
        select(spec.config, "data.val_files"),
        select(spec.config, "actor_rollout_ref.model.path"),
    ]
    home = prepare.default_folder(kind)
    if any(isinstance(path, str) and Path(path).is_relative_to(home) for path in wanted):
        view.phase(f"preparing the {kind} data")
        prepare.ensure(kind, stack_env=stack, progress=DataProgress(kind, view))


def preflight(stack: StackEnv, config: Mapping[str, Any]) -> dict[str, Any]:
    """Look at model and data with the stack's own libraries (see :mod:`verl_p40.train.inside`).

    Raises:
        DataError: the first thing wrong, with what to do.
    """
    with tempfile.TemporaryDirectory(prefix="vp40-check-") as scratch:
        path = Path(scratch) / "config.json"
        path.write_text(json.dumps(config, default=str), encoding="utf-8")
        try:
            done = stack.run_module(
                inside.__name__, [str(path)], env=_QUIET, capture=True, timeout=1800
            )
        except subprocess.TimeoutExpired as error:
            raise DataError("checking model and data took more than 30 minutes") from error
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(inside.MARK):
            report: dict[str, Any] = json.loads(line)["verl_p40_preflight"]
            break
    else:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DataError(f"checking model and data failed (exit code {done.returncode}): {last}")
    if report["problem"]:
        raise DataError(report["problem"]["message"], fix=report["problem"]["fix"])
    return report


_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true", "USE_TF": "0"}


def _finished(spec: RunSpec) -> Summary:
    history = History.read(spec.run.metrics)
    if spec.run.finished_at() is None:
        spec.run.add_event("end", step=spec.step, total=spec.step, status="finished", seconds=0.0)
    return Summary(spec, None, tuple(history.rows()), spec.step)


def _conclude(spec: RunSpec, result: Result) -> Summary:
    run, outcome = spec.run, result.outcome
    if outcome.status == "tripped" and outcome.trip is not None:
        raise TripwireError(outcome.trip.line(), fix=f"the whole log is {run.log}")
    if outcome.status == "failed" and outcome.failure is not None:
        at = f"after step {outcome.step}" if outcome.step else "before the first step"
        lines = "".join(f"\n  | {line}" for line in outcome.failure.lines)
        why = f"\n  {result.why}" if result.why else ""
        raise TrainingError(
            f"the trainer failed while {outcome.phase}, {at} ({outcome.exit_text}): "
            f"{outcome.failure.headline}{lines}{why}",
            fix=f"read {run.log}; after a remedy, `{spec.user_command()}` goes on",
        )
    rows = tuple(outcome.history.rows())
    return Summary(spec, outcome, rows, outcome.total, result.attempts, result.rungs)
