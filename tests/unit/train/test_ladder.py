"""What a run gives up when memory runs out, planned with the real presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_p40.train import checks, ladder
from verl_p40.train.compose import compose, select
from verl_p40.train.failures import Failure, explain
from verl_p40.train.ladder import Rung

ACTOR_MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


@pytest.fixture(scope="module")
def ppo(verl_config: Path) -> dict[str, Any]:
    return compose("p40-ppo", (), verl_config).config


def _failure(kind: str, model: str = "") -> Failure:
    return Failure("torch.OutOfMemoryError: CUDA out of memory.", (), kind=kind, model=model)


def _descend(config: dict[str, Any], failure: Failure, doing: str = "training") -> list[Rung]:
    taken: list[Rung] = []
    while (rung := ladder.next_rung(config, taken, failure, doing)) is not None:
        taken.append(rung)
        assert len(taken) < 20, "a ladder has to end"
    return taken


def _keys(rungs: list[Rung]) -> set[str]:
    return {word.split("=")[0].lstrip("+") for rung in rungs for word in rung.overrides}


def test_logits_of_the_update_take_smaller_micro_batches(ppo: dict[str, Any]) -> None:
    rungs = _descend(ppo, _failure("cuda-oom-logits", "actor"))
    assert f"{ACTOR_MICRO}=1" in ladder.overrides(rungs)
    assert rungs[0].overrides == (f"{ACTOR_MICRO}=2",)
    after = ladder.applied(ppo, rungs)
    assert select(after, ACTOR_MICRO) == 1
    assert select(ppo, ACTOR_MICRO) == 4
    checks.check_batches(after)


def test_the_rollout_takes_fewer_prompts_at_a_time(ppo: dict[str, Any]) -> None:
    rungs = _descend(ppo, _failure("cuda-oom", "rollout"))
    # Eager attention returns its weights, which live on beside the MLP; SDPA costs nothing.
    attention = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    assert rungs[0].overrides == (attention,)
    # The key is not in verl's config, and may be in the user's: ++ is right for both.
    fewer = "++actor_rollout_ref.rollout.micro_batch_size=1"
    assert ladder.overrides(rungs) == [attention, fewer]


@pytest.mark.parametrize(
    ("call", "key"),
    [
        ("ref_compute_ref_log_prob", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
        ("critic_update_critic", "critic.ppo_micro_batch_size_per_gpu"),
    ],
)
def test_the_worker_s_method_says_where(ppo: dict[str, Any], call: str, key: str) -> None:
    """In Ray's words, above the traceback: seen in a real run."""
    header = f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.{call}() (pid=1)"
    failure = explain(f"{header}\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    assert (failure.call, failure.kind) == (call, "cuda-oom")
    rung = ladder.next_rung(ppo, (), failure, "training")
    assert rung is not None
    assert rung.overrides[0].startswith(f"{key}=")


def test_a_validation_takes_smaller_batches(ppo: dict[str, Any]) -> None:
    assert "data.val_batch_size" in _keys(
        _descend(ppo, _failure("cuda-oom", "rollout"), "validating")
    )


def test_a_smaller_batch_is_no_help_to_the_optimizer(
    verl_config: Path, ppo: dict[str, Any]
) -> None:
    failure = _failure("cuda-oom-optimizer", "actor")
    assert _descend(ppo, failure) == []  # everything that can be offloaded is
    critic = "critic.model.fsdp_config.optimizer_offload"
    config = compose("p40-ppo", (f"{critic}=false",), verl_config).config
    assert _keys(_descend(config, failure)) == {critic}


def test_no_rung_leaves_the_checkpoints_behind(ppo: dict[str, Any]) -> None:
    """fsdp2 would free most, and cannot load what fsdp saved."""
    for kind in ("cuda-oom", "cuda-oom-load", "cuda-oom-optimizer", "cuda-oom-backward"):
        for model in ("", "actor", "critic", "reference", "rollout"):
            assert not any("strategy" in key for key in _keys(_descend(ppo, _failure(kind, model))))


def test_nothing_that_shapes_learning_is_changed(ppo: dict[str, Any]) -> None:
    taken = [r for m in ("actor", "critic", "reference", "rollout")
             for r in _descend(ppo, _failure("cuda-oom", m))]  # fmt: skip
    after = ladder.applied(ppo, taken)
    for key in (
        "data.train_batch_size",
        "data.max_response_length",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.optim.lr",
        "critic.ppo_mini_batch_size",
    ):
        assert select(after, key) == select(ppo, key)


def test_a_model_without_a_plan_is_stepped_down_all_the_same(ppo: dict[str, Any]) -> None:
    other = ladder.applied(ppo, [Rung("", "", ("actor_rollout_ref.model.path=me/unheard-of",))])
    rungs = _descend(other, _failure("cuda-oom-logits", "actor"))
    assert f"{ACTOR_MICRO}=1" in ladder.overrides(rungs)


def test_rungs_are_kept_with_the_run() -> None:
    rung = Rung("actor updates of 2 samples at a time", "10 %", (f"{ACTOR_MICRO}=2",))
    assert ladder.stored({"ladder": [rung.document()]}) == (rung,)
    assert ladder.stored({}) == ()
