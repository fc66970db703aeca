"""Verdict and changes: what is proposed is planned again, and makes it fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_p40.errors import UsageError
from verl_p40.plan.fit import (
    MIB,
    Plan,
    candidates,
    changes,
    default_card,
    later_wins,
    make_plan,
)
from verl_p40.train.compose import compose

ACTOR = "actor_rollout_ref.actor"


def test_the_card_is_a_p40_with_ecc_on() -> None:
    assert default_card() == 22_912 * MIB


def test_a_run_that_fits_needs_no_change(planned: Callable[..., Plan], composer: Any) -> None:
    plan = planned("p40-ppo")
    assert plan.fits
    assert changes(plan, composer("p40-ppo")) == []


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.ppo_micro_batch_size_per_gpu=32"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",),
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B",),
        ("data.val_batch_size=1319", "data.max_prompt_length=512"),
    ],
    ids=["micro", "log-prob", "1.5B", "validation"],
)
def test_what_is_proposed_makes_it_fit(
    planned: Callable[..., Plan], composer: Any, overrides: tuple[str, ...]
) -> None:
    plan = planned("p40-ppo", *overrides)
    assert not plan.fits
    found = changes(plan, composer("p40-ppo", *overrides))
    assert found
    pasted = [text for change in found for text in change.overrides]
    again = planned("p40-ppo", *later_wins([*overrides, *pasted]))
    assert again.fits
    for change in found:
        fewer = [text for c in found if c is not change for text in c.overrides]
        without = make_plan(composer("p40-ppo", *overrides)(fewer), plan.card)
        assert not without.fits, f"{change.what} was not needed"


def test_the_cheapest_comes_first(planned: Callable[..., Plan], composer: Any) -> None:
    """Too many log-probabilities at once: their entropy in parts, then fewer; no smaller updates."""
    micro = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    chunked = "actor_rollout_ref.actor.entropy_from_logits_with_chunking=true"
    for overrides, wanted in (
        ((f"{micro}=32",), [(chunked,)]),
        ((f"{micro}=64", chunked), [(f"{micro}=32",)]),
    ):
        plan = planned("p40-ppo", *overrides)
        assert plan.peak.name == "log-prob"
        found = changes(plan, composer("p40-ppo", *overrides))
        assert found is not None
        assert [c.overrides for c in found] == wanted


def test_where_nothing_helps_it_says_so(planned: Callable[..., Plan], composer: Any) -> None:
    plan = planned("p40-ppo", card=1024 * MIB)
    assert changes(plan, composer("p40-ppo")) is None


def test_more_memory_more_margin(planned: Callable[..., Plan]) -> None:
    small, large = planned("p40-ppo"), planned("p40-ppo", card=24_451 * MIB)
    assert large.margin - small.margin == (24_451 - 22_912) * MIB


def test_cards_share_moments_and_gradients(planned: Callable[..., Plan]) -> None:
    one = planned("p40-ppo")
    peaks = [one.peak.allocated]
    for cards in (2, 4, 8):
        plan = planned("p40-ppo", f"trainer.n_gpus_per_node={cards}")
        assert plan.setup.rollout_batch == 32 // cards
        peaks.append(plan.peak.allocated)
    assert peaks[1:] == sorted(peaks[1:], reverse=True)


def test_vllm_takes_its_share_and_its_sync(planned: Callable[..., Plan]) -> None:
    plan = planned(
        "p40-ppo",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    )
    rollout = next(p for p in plan.phases if p.name == "rollout")
    assert rollout.parts["vLLM"] == int(0.3 * default_card())
    assert plan.host["vLLM weights asleep"] == 4 * plan.setup.actor.shape.parameters


def test_disk_and_host(planned: Callable[..., Plan]) -> None:
    plan = planned("p40-ppo")
    n = plan.setup.actor.shape.parameters
    assert plan.disk.checkpoint == 2 * 12 * n
    assert plan.disk.kept == 2
    assert plan.disk.total == 3 * plan.disk.checkpoint
    assert plan.host["offloaded Adam moments"] == pytest.approx(2 * 8 * n, rel=1e-3)
    unlimited = planned("p40-ppo", "trainer.max_actor_ckpt_to_keep=null")
    assert unlimited.disk.kept is None
    assert planned("p40-ppo", "trainer.save_freq=-1").disk.total == 0


@pytest.mark.parametrize("preset", ["p40-ppo", "p40-grpo-1.5b", "p40-ppo-vllm"])
def test_a_candidate_is_composed_as_hydra_does(
    preset: str, verl_config: Path, composer: Any, planned: Callable[..., Plan]
) -> None:
    """hydra once with every candidate; one by one they are set in what it composed."""
    found = list(candidates(planned(preset).setup))
    overrides = later_wins([text for change in found for text in change.overrides])
    assert len(overrides) > 5
    variant = composer(preset)(overrides)
    assert variant == compose(preset, overrides, verl_config).config
    assert composer(preset)([]) == compose(preset, [], verl_config).config != variant


@pytest.mark.parametrize("override", ["no.such.key=1", "=", "~trainer.logger"])
def test_a_variant_refuses_what_hydra_would(composer: Any, override: str) -> None:
    with pytest.raises(UsageError):
        composer("p40-ppo")([override])
