"""GRPO: no critic, several samples a prompt."""

from __future__ import annotations

import json

from conftest import Cli


def test_grpo_trains(cli: Cli) -> None:
    done = cli.run(
        str(cli.preset),
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=3",
        "trainer.save_freq=-1",
    )
    assert done.returncode == 0, done.stdout
    (metrics,) = cli.runs.glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert all("critic/vf_loss" not in s["data"] for s in steps)
    assert all("actor/kl_loss" in s["data"] for s in steps)
    assert list(cli.runs.glob("*/tensorboard/events.out.tfevents.*"))
    # 8 prompts x 4 samples of at most 8 tokens: all four of a prompt are different ones.
    assert steps[0]["data"]["global_seqlen/mean"] >= 32 * 3
