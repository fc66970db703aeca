"""The CUDA branches of the patches, on any NVIDIA GPU, capped to what a P40 has.

The card's compute capability is reported as 6.1, so that defaults are those of a P40; kernels are
of course those of the card at hand. Memory is capped to a P40's 22,912 MiB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

P40_BYTES = 22912 * 2**20
"""Usable memory of a P40 with ECC on (its default), older drivers: the smallest figure."""


@pytest.fixture(autouse=True)
def like_a_p40(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, P40_BYTES / total))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))


@pytest.fixture
def gpu_config(worker_config: Any) -> Any:
    return lambda *overrides: worker_config(
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True",
        "critic.model.fsdp_config.param_offload=True",
        "critic.model.fsdp_config.optimizer_offload=True",
        *overrides,
    )


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_ppo_step_in_fp32(
    gpu_config: Any,
    model_dir: Path,
    batch: Any,
    prompts: Any,
    half_precision_ops: Any,
    attention: str,
) -> None:
    """Rollout, log-probs, values and both updates: no half precision, FP32 accuracy."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

    override = f"override_config.attn_implementation={attention}"
    config = gpu_config(f"+actor_rollout_ref.model.{override}", f"+critic.model.{override}")
    with half_precision_ops:
        actor = ActorRolloutRefWorker(config.copy().actor_rollout_ref, role="actor_rollout")
        actor.init_model()
        reference = ActorRolloutRefWorker(config.copy().actor_rollout_ref, role="ref")
        reference.init_model()
        critic = CriticWorker(config.critic)
        critic.init_model()
        assert actor.actor_module.config._attn_implementation == attention
        rollout = actor.generate_sequences(prompts)
        assert rollout.batch["responses"].shape == (4, 6)
        log_probs = actor.compute_log_prob(batch).batch["old_log_probs"]
        reference_log_probs = reference.compute_ref_log_prob(batch).batch["ref_log_prob"]
        values = critic.compute_values(batch).batch["values"]

        batch.batch["old_log_probs"] = log_probs
        batch.batch["values"] = values
        batch.batch["returns"] = values + 1
        batch.batch["advantages"] = torch.ones_like(values)
        batch.meta_info["global_token_num"] = [14] * 4
        before = actor.compute_log_prob(batch).batch["old_log_probs"].clone()
        actor_metrics = actor.update_actor(batch).meta_info["metrics"]
        critic_metrics = critic.update_critic(batch).meta_info["metrics"]
        after = actor.compute_log_prob(batch).batch["old_log_probs"]
    assert half_precision_ops.seen == []
    assert not torch.equal(before, after)
    assert all(torch.isfinite(torch.tensor(actor_metrics["actor/grad_norm"])).tolist())
    assert all(torch.isfinite(torch.tensor(critic_metrics["critic/grad_norm"])).tolist())

    # against float64 on the CPU, a row at a time without its padding
    model = AutoModelForCausalLM.from_pretrained(model_dir, torch_dtype=torch.float64)
    for row in range(4):
        real = batch.batch["attention_mask"][row].bool().cpu()
        ids = batch.batch["input_ids"][row].cpu()
        with torch.no_grad():
            logits = model(input_ids=ids[real].unsqueeze(0)).logits[0].log_softmax(-1)
        expected = logits[:-1].gather(-1, ids[real][1:].unsqueeze(-1)).squeeze(-1)
        answer = real[-6:]
        expected = expected[-int(answer.sum()) :]
        for measured in (log_probs, reference_log_probs):
            torch.testing.assert_close(
                measured[row][answer].double().cpu(), expected, rtol=1e-4, atol=1e-4
            )


def test_a_checkpoint_round_trip(gpu_config: Any, batch: Any, tmp_path: Path) -> None:
    import torch
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(gpu_config().actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    before = worker.compute_log_prob(batch).batch["old_log_probs"].clone()
    worker.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    batch.batch["old_log_probs"] = before
    batch.batch["advantages"] = torch.ones_like(before)
    batch.meta_info["global_token_num"] = [14] * 4
    worker.update_actor(batch)
    assert not torch.equal(worker.compute_log_prob(batch).batch["old_log_probs"], before)
    worker.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    assert torch.equal(worker.compute_log_prob(batch).batch["old_log_probs"], before)
