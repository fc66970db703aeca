"""Proofs of patches/verl/p40 on precision: nothing computes in a half dtype unasked."""

from __future__ import annotations

from typing import Any

import pytest


def test_actor_and_reference_default_to_fp32(worker_config: Any) -> None:
    import torch
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    actor = ActorRolloutRefWorker(worker_config().actor_rollout_ref, role="actor_rollout")
    actor.init_model()
    reference = ActorRolloutRefWorker(worker_config().actor_rollout_ref, role="ref")
    reference.init_model()
    for module in (actor.actor_module_fsdp, reference.ref_module_fsdp):
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        assert module.mixed_precision.param_dtype == torch.float32


def test_critic_defaults_to_fp32(worker_config: Any) -> None:
    import torch
    from verl.workers.fsdp_workers import CriticWorker

    critic = CriticWorker(worker_config().critic)
    critic.init_model()
    assert {p.dtype for p in critic.critic_module.parameters()} == {torch.float32}
    assert critic.critic_module.mixed_precision.param_dtype == torch.float32


def make_reward_worker(config: Any, model_dir: Any) -> Any:
    from verl.workers.fsdp_workers import RewardModelWorker

    config = config(f"reward_model.model.path={model_dir}").reward_model
    config.model.input_tokenizer = None
    worker = RewardModelWorker(config)
    worker.init_model()
    return worker


def test_reward_model_defaults_to_fp32(
    worker_config: Any, value_model_dir: Any, batch: Any, half_precision_ops: Any
) -> None:
    import torch

    worker = make_reward_worker(worker_config, value_model_dir)
    assert {p.dtype for p in worker.reward_module.parameters()} == {torch.float32}
    with half_precision_ops:
        scores = worker.compute_rm_score(batch).batch["rm_scores"]
    assert scores.shape == (4, 6)
    assert half_precision_ops.seen == []


def float64_reference(folder: Any, auto_class: Any, batch: Any) -> Any:
    """Logits (4, 14, labels) of the stored model in float64."""
    import torch

    model = auto_class.from_pretrained(
        folder, torch_dtype=torch.float64, attn_implementation="eager"
    )
    # a row at a time without its padding: transformers' additive mask overflows in float64
    rows = []
    for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True):
        real = mask.bool()
        with torch.no_grad():
            logits = model(input_ids=ids[real].unsqueeze(0)).logits[0]
        row = torch.full((len(ids), logits.shape[-1]), float("nan"), dtype=torch.float64)
        row[real] = logits
        rows.append(row)
    return torch.stack(rows)


def test_actor_forward_has_no_bf16_autocast(worker_config: Any, model_dir: Any, batch: Any) -> None:
    """Log-probs agree with float64 to FP32 accuracy; BF16 matmuls are off by about 1e-2."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    logits = float64_reference(model_dir, AutoModelForCausalLM, batch)[:, 7:13]
    labels = batch.batch["responses"]
    expected = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    actor = ActorRolloutRefWorker(worker_config().actor_rollout_ref, role="actor_rollout")
    actor.init_model()
    log_probs = actor.compute_log_prob(batch).batch["old_log_probs"]
    mask = batch.batch["attention_mask"][:, -6:].bool()
    torch.testing.assert_close(log_probs.double()[mask], expected[mask], rtol=1e-4, atol=1e-4)


def test_critic_forward_has_no_bf16_autocast(
    worker_config: Any, value_model_dir: Any, batch: Any
) -> None:
    import torch
    from transformers import AutoModelForTokenClassification
    from verl.workers.fsdp_workers import CriticWorker

    expected = float64_reference(value_model_dir, AutoModelForTokenClassification, batch)
    critic = CriticWorker(worker_config(f"critic.model.path={value_model_dir}").critic)
    critic.init_model()
    values = critic.compute_values(batch).batch["values"]
    mask = batch.batch["attention_mask"][:, -6:].bool()
    torch.testing.assert_close(
        values.double()[mask], expected[:, 7:13, 0][mask], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("dtype", "half"), [("float32", False), ("bfloat16", True)])
def test_hf_rollout_generates_in_its_dtype(
    worker_config: Any, prompts: Any, half_precision_ops: Any, dtype: str, half: bool
) -> None:
    """rollout.dtype decides, both ways: nothing is hard-wired to FP32 either."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    config = worker_config(
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    )
    actor = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    actor.init_model()
    with half_precision_ops:
        actor.generate_sequences(prompts)
    assert bool(half_precision_ops.seen) is half


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((6, 1), "float32"), ((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")],
)
def test_default_dtype_follows_the_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    """Not torch.cuda.is_bf16_supported(), which says yes to emulation on a P40."""
    import torch
    from verl.utils import precision

    monkeypatch.setattr(precision, "is_cuda_available", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert precision.get_compute_dtype() == getattr(torch, expected)
    asked = {"mixed_precision": {"param_dtype": "fp32"}}
    assert precision.get_compute_dtype(asked) == torch.float32
