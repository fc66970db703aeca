"""Every preset for a P40 composes, passes the checks of a start, and fits by plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_p40.plan.fit import Plan, make_plan
from verl_p40.train import catalog, checks, traps
from verl_p40.train.compose import select

P40 = [name for name in catalog.names() if name.startswith("p40")]


def test_the_presets_of_the_issue_are_there() -> None:
    wanted = {"p40-ppo", "p40-grpo", "p40-grpo-1.5b", "p40-lora", "p40x2", "p40x4", "p40-recipe"}
    assert wanted <= set(P40)


@pytest.mark.parametrize("name", P40)
def test_it_starts_and_fits(name: str, composer: Any) -> None:
    config = composer(name)([])
    checks.check_batches(config)
    traps.check_traps(config)
    plan = make_plan(config, 22_912 * 2**20)
    assert plan.fits, (plan.peak, plan.margin)
    assert select(config, "trainer.experiment_name") == name


def test_lora_of_3b_fits(planned: Callable[..., Plan]) -> None:
    plan = planned("p40-lora", "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct")
    assert plan.fits
    assert plan.setup.actor.lora


def test_full_1_5b_needs_the_host(planned: Callable[..., Plan]) -> None:
    plan = planned("p40-grpo", "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct")
    assert not plan.fits


def test_each_has_its_plan_in_the_docs(planned: Callable[..., Plan]) -> None:
    """docs/presets.md: peak phase and GiB as `verl-p40 plan` gives them."""
    text = (Path(__file__).parents[3] / "docs" / "presets.md").read_text(encoding="utf-8")
    for name in P40:
        peak = planned(name).peak
        assert f"| `{name}` | {peak.name} | {peak.allocated / 2**30:.2f} |" in text, name
