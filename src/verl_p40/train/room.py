"""Whether a run has room: the planner's word on card and host, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from verl_p40.errors import MachineError, VerlP40Error
from verl_p40.hardware.cards import cards
from verl_p40.plan import fit
from verl_p40.plan.fit import Plan
from verl_p40.train.compose import Config
from verl_p40.train.ladder import Rung, applied

ERROR = 0.10
"""Share by which a plan may be too large (the goal that docs/plan.md measures it by)."""
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def check_room(config: Mapping[str, Any], name: str) -> list[str]:
    """Plan a resolved config for this machine.

    Args:
        config: models of the hub given by their folders.
        name: the preset's.

    Returns:
        Warnings: what may not fit, or has no plan.

    Raises:
        MachineError: it cannot fit, with the settings that would.
    """
    card = min((card.memory for card in cards()), default=fit.default_card())
    try:
        plan = fit.make_plan(dict(config), card)
    except VerlP40Error as error:
        return [f"its memory cannot be planned: {error.message}"]
    warnings = _check_card(plan, config, name) if plan.setup.device == "cuda" else []
    return warnings + _check_host(plan, name)


def _check_card(plan: Plan, config: Mapping[str, Any], name: str) -> list[str]:
    if plan.fits:
        return []
    need = plan.needed(plan.peak)
    text = (
        f"{name} is planned to need {_gib(need)} of the card's {_gib(plan.card)}, in the phase "
        f"{plan.peak.name}"
    )
    if need * (1 - ERROR) <= plan.card:
        return [f"{text}: it may just fit"]

    def composed(more: Sequence[str]) -> Config:
        return applied(config, [Rung("", "", tuple(more))])

    changes = fit.changes(plan, composed)
    if not changes:
        raise MachineError(text, fix="`verl-p40 plan` shows where it goes; a smaller model")
    overrides = [word for change in changes for word in change.overrides]
    raise MachineError(text, fix=" ".join(fit.later_wins(overrides)))


def _check_host(plan: Plan, name: str) -> list[str]:
    need = sum(plan.host.values())
    if plan.setup.device == "cpu":
        need += plan.peak.allocated
    memory = psutil.virtual_memory()
    total = min(memory.total, _cgroup_limit() or memory.total)
    text = f"{name} is planned to need {_gib(need)} of host memory"
    if need * (1 - ERROR) > total:
        raise MachineError(
            f"{text}, and this machine (or container) has {_gib(total)}",
            fix="less offload to the host, a smaller model or batch, or more memory",
        )
    if need > memory.available:
        return [f"{text}, and {_gib(memory.available)} are free now"]
    return []


def _cgroup_limit() -> int | None:
    for file in _CGROUPS:
        try:
            return int(file.read_text())
        except (OSError, ValueError):
            continue
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
