"""What helps most against a CUDA out of memory of a run whose config is at hand: ask the planner."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from verl_p40.diagnose import memory
from verl_p40.train.folder import RunFolder

if TYPE_CHECKING:
    from verl_p40.plan.fit import Change, Plan

_PHASES = (
    (("cuda-oom-optimizer", "cuda-oom-backward"), "critic", ("critic update",)),
    (("cuda-oom-optimizer", "cuda-oom-backward"), "actor", ("actor update",)),
    (("cuda-oom-optimizer", "cuda-oom-backward"), "", ("actor update", "critic update")),
    (("cuda-oom-wake-up", "cuda-oom-vllm-start", "cuda-oom-weight-sync"), "", ("rollout",)),
    (("cuda-oom-load",), "", ("load",)),
    (("cuda-oom-logits",), "reference", ("reference",)),
    (("cuda-oom-logits",), "", ("log-prob", "actor update")),
    ((), "rollout", ("rollout", "validation")),
    ((), "reference", ("reference",)),
    ((), "critic", ("values", "critic update")),
    ((), "actor", ("log-prob", "actor update")),
)
"""Kind of the out of memory and model at work (none: any), and the planner's phases that fit."""
_SHOWN = 2
_WORTH = 64 << 20
"""Bytes below which a change is not worth a line."""


def for_run(run: RunFolder | None) -> Callable[[memory.CudaOom], Sequence[str]]:
    """What ``diagnose`` asks: the planner's word first, where there is a config to plan.

    The planner reads what verl does; a config that it does not understand must not cost the
    user a diagnosis, so its failure, of whatever sort, leaves the advice by the numbers alone.
    """

    def advise(oom: memory.CudaOom) -> Sequence[str]:
        plain = memory.advise(oom)
        if run is None or not run.started():
            return plain
        try:
            planned = _planned(run.read_config(), oom)
        except Exception:
            return plain
        return (*planned, *plain)

    return advise


def _planned(config: Mapping[str, Any], oom: memory.CudaOom) -> list[str]:
    from verl_p40.plan import fit
    from verl_p40.plan.fit import make_plan

    plan = make_plan(dict(config), oom.total or fit.default_card())
    phase = _phase(plan, oom)
    before = plan.needed(next(p for p in plan.phases if p.name == phase))
    found = sorted(_savings(config, plan, phase, before), key=lambda one: -one[0])
    verdict = (
        "should fit: is something else on the card?" if before <= plan.card else "is too much."
    )
    most = "What frees most of it:" if found else "No single setting frees any of it."
    head = (
        f"# by the planner {phase} needs {memory.show(before)} of {memory.show(plan.card)}, "
        f"which {verdict} {most}"
    )
    return [head, *(_line(saved, change) for saved, change in found[:_SHOWN])]


def _line(saved: int, change: Change) -> str:
    return (
        f"{' '.join(change.overrides)}   # frees {memory.show(saved)}: {change.what}; "
        f"costs: {change.cost}"
    )


def _phase(plan: Plan, oom: memory.CudaOom) -> str:
    """The planner's phase in which it struck: of those that fit the frames the largest."""
    sizes = {phase.name: phase.allocated for phase in plan.phases}
    for kinds, model, names in _PHASES:
        if (kinds and oom.phase not in kinds) or (model and oom.model != model):
            continue
        there = [name for name in names if name in sizes]
        if there:
            return max(there, key=lambda name: sizes[name])
    return plan.peak.name


def _savings(
    config: Mapping[str, Any], plan: Plan, phase: str, before: int
) -> Iterator[tuple[int, Change]]:
    """Every change of settings that lowers ``phase``; of the halvings of one batch the best."""
    from verl_p40.plan.fit import candidates, make_plan

    best: dict[tuple[str, ...], tuple[int, Change]] = {}
    for change in candidates(plan.setup):
        if not change.resumable:
            continue
        trial = make_plan(_changed(config, change.overrides), plan.card)
        after = next((trial.needed(p) for p in trial.phases if p.name == phase), before)
        keys = tuple(text.split("=")[0] for text in change.overrides)
        if before - after >= _WORTH and (keys not in best or before - after > best[keys][0]):
            best[keys] = (before - after, change)
    yield from best.values()


def _changed(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A resolved config with overrides set in it, whether it had their keys or not."""
    changed = copy.deepcopy(dict(config))
    for text in overrides:
        path, _, value = text.lstrip("+").partition("=")
        *parents, last = path.split(".")
        node = changed
        for name in parents:
            node = node.setdefault(name, {}) or {}
        node[last] = yaml.safe_load(value)
    return changed
