"""What a run gives up, one rung at a time, when the card's memory runs out.

The rungs are the planner's changes (:func:`verl_p40.plan.fit.candidates`), in order of speed lost.
The next rung is the cheapest one that, planned again, lowers the moment in which memory ran out,
that verl's own assertions take, and after which the checkpoints of the run can still be loaded. A
rung changes how a step is computed, never what is learned from: batch, lengths, learning rate and
loss stay. Rungs are given to verl as overrides of an attempt; the run's ``config.yaml`` stays.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from verl_p40.errors import VerlP40Error
from verl_p40.plan import fit, shapes
from verl_p40.plan import setup as settings
from verl_p40.plan.phases import (
    ACTIVATIONS,
    CACHE,
    LOGITS,
    TEMPORARIES,
    Parts,
    Phase,
    plan_phases,
)
from verl_p40.plan.setup import Setup
from verl_p40.train import checks, traps
from verl_p40.train.compose import Config, assign
from verl_p40.train.failures import Failure

OUT_OF_MEMORY = "cuda-oom"
"""What the kinds of diagnose's rules on a full card begin with."""

_STAND_IN = "Qwen/Qwen2.5-0.5B"
"""Whose sizes are planned with where those of the model are not known: the order stays right."""

_OPTIMIZER = "cuda-oom-optimizer"
_UPDATES = (_OPTIMIZER, "cuda-oom-backward")
_PHASES = {
    "actor": ("log-prob", "actor update"),
    "critic": ("values", "critic update"),
    "reference": ("reference",),
    "rollout": ("rollout",),
}
"""The planner's phases of what the traceback's frames name."""
_CALLS = {
    "generate_sequences": ("rollout",),
    "compute_log_prob": ("log-prob",),
    "compute_ref_log_prob": ("reference",),
    "compute_values": ("values",),
    "update_critic": ("critic update",),
    "update_actor": ("actor update",),
    "save_checkpoint": ("checkpoint",),
    "init_model": ("load",),
}
"""The planner's phases of what the worker's method ends with, as Ray names it."""
_WHERE = {
    "loading the models": ("load",),
    "loading the checkpoint": ("load", "checkpoint"),
    "saving a checkpoint": ("checkpoint",),
    "validating": ("validation",),
}
"""The planner's phases of what the log says is being done."""


@dataclass(frozen=True)
class Rung:
    """One change: what it is, what it costs, and the overrides that make it."""

    what: str
    cost: str
    overrides: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def stored(document: Mapping[str, Any]) -> tuple[Rung, ...]:
    """The rungs that earlier attempts at a run took, from its ``env.json``."""
    found = []
    for entry in document.get("ladder") or ():
        overrides = tuple(map(str, entry["overrides"]))
        found.append(Rung(str(entry["what"]), str(entry["cost"]), overrides))
    return tuple(found)


def overrides(rungs: Iterable[Rung]) -> list[str]:
    """All rungs for verl's command line: the last word on each setting."""
    words = [word for rung in rungs for word in rung.overrides]
    # An added key may be in the user's config already: ++ takes both.
    return [f"+{word}" if word.startswith("+") else word for word in fit.later_wins(words)]


def applied(config: Mapping[str, Any], rungs: Iterable[Rung]) -> Config:
    """The config of an attempt: ``config`` with the rungs taken."""
    changed = copy.deepcopy(dict(config))
    for word in (word for rung in rungs for word in rung.overrides):
        key, value = word.lstrip("+").split("=", 1)
        assign(changed, key, yaml.safe_load(value))
    return changed


def next_rung(
    config: Mapping[str, Any], taken: Sequence[Rung], failure: Failure, doing: str
) -> Rung | None:
    """The cheapest change that lowers what ran out; None when the ladder ends.

    Args:
        config: the run's config, models of the hub given by their folders.
        taken: the rungs of the attempt that failed.
        doing: what the log says that the trainer was doing.
    """
    current = applied(config, taken)
    setup = _setup(current)
    if setup is None:
        return None
    names = _ran_out(setup, failure, doing)
    now = _size(setup, names, failure.kind)
    for change in fit.candidates(setup):
        rung = Rung(change.what, change.cost, change.overrides)
        trial = applied(current, [rung])
        after = _setup(trial) if change.resumable and _is_allowed(trial) else None
        if after is not None and _size(after, names, failure.kind) < now:
            return rung
    return None


def _setup(config: Mapping[str, Any]) -> Setup | None:
    for shape in (None, _STAND_IN):
        try:
            return settings.read(config, shapes.find(shape) if shape else None)
        except VerlP40Error:
            continue
    return None


def _is_allowed(config: Mapping[str, Any]) -> bool:
    try:
        checks.check_batches(config)
        traps.check_traps(config)
    except VerlP40Error:
        return False
    return True


def _ran_out(setup: Setup, failure: Failure, doing: str) -> set[str]:
    """The names of the planner's phases in which memory may have run out; the peak's, if unknown."""
    phases = {phase.name: phase for phase in _planned(setup)}
    named = _PHASES.get(failure.model, ())
    if failure.kind in _UPDATES:
        named = tuple(name for name in named if name.endswith("update"))
    # A rollout of the validation is the rollout's code.
    called = next((n for end, n in _CALLS.items() if failure.call.endswith(end)), ())
    for names in (_WHERE.get(doing, ()), called, named):
        known = {name for name in names if name in phases}
        if known:
            return known
    return {max(phases.values(), key=lambda phase: phase.allocated).name}


def _planned(setup: Setup) -> Iterator[Phase]:
    yield from plan_phases(setup, fit.default_card())


def _size(setup: Setup, names: set[str], kind: str) -> int:
    """The bytes of the largest moment of some phases that memory can have run out in."""
    phases = [phase for phase in _planned(setup) if phase.name in names]
    moments = [moment for phase in phases for moment in phase.moments]
    return max(sum(moment.values()) for moment in _of_kind(moments, kind))


def _of_kind(moments: Sequence[Parts], kind: str) -> Sequence[Parts]:
    """The optimizer's moments are not those of activations: a smaller batch does nothing for it."""
    wanted = {TEMPORARIES} if kind == _OPTIMIZER else {ACTIVATIONS, LOGITS, CACHE}
    return [moment for moment in moments if wanted & moment.keys()] or moments
