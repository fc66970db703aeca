"""Host memory and disk: what is not on the card has to be somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_p40.plan.phases import Parts
from verl_p40.plan.setup import Model, Setup
from verl_p40.plan.tensors import FP32
from verl_p40.train.checks import checkpoint_bytes, uses_critic
from verl_p40.train.compose import select

PROCESSES = 4_000_000_000
"""Bytes of the trainer, one worker and Ray around a model of no size: the CPU demo's 4.0 GB
resident (measured, 82k parameters)."""

WORKER = 1_500_000_000
"""Bytes of each further worker: Python, torch and CUDA's libraries (estimate)."""


@dataclass(frozen=True)
class Disk:
    """Bytes of one checkpoint, and how many are kept; None: every one is kept."""

    checkpoint: int
    kept: int | None

    @property
    def total(self) -> int | None:
        """Bytes at most: an older checkpoint goes when the new one is whole."""
        return None if self.kept is None else self.checkpoint * (self.kept + 1)


def plan_host(setup: Setup) -> Parts:
    """Bytes of host memory at its largest, by part, of all ranks of this machine together.

    With tied embeddings every rank reads the whole model into host memory before FSDP takes it
    (``get_init_weight_context_manager``), one model after the other; else rank 0 alone. A
    checkpoint brings the state dict of the largest model to the host. The larger one counts.
    """
    parts: Parts = {"processes": PROCESSES + WORKER * (setup.world - 1)}
    models = [m for m in (setup.actor, setup.reference, setup.critic) if m is not None]
    if setup.device != "cuda":
        parts["models (planned as the card's)"] = 0
        return parts
    parts["offloaded weights"] = sum(
        m.parameters * FP32 for m in models if m.param_offload or m.cpu_policy
    )
    parts["offloaded Adam moments"] = sum(
        2 * m.trained * FP32
        for m in models
        if m.trained and m.optimizer_offload and not m.cpu_policy
    )
    for model in models:
        if model.trained and model.cpu_policy:
            # gradients, both moments, and AdamW's temporaries a parameter at a time
            parts["optimizer on the host"] = 3 * model.trained * FP32
    if setup.rollout_name == "vllm":
        parts["vLLM weights asleep"] = setup.world * setup.actor.parameters * setup.rollout_bytes
    parts["reading or saving a model"] = max(_read(m) for m in models)
    return {name: size for name, size in parts.items() if size}


def _read(model: Model) -> int:
    ranks = model.world if model.shape.tied else 1
    return ranks * model.parameters * FP32


def plan_disk(setup: Setup, config: Mapping[str, Any]) -> Disk:
    """Checkpoints: what ``save_contents`` names of each trained model, times how many are kept.

    FSDP saves the frozen weights of a LoRA model too, but Adam's moments of the adapter alone.
    """
    if int(select(config, "trainer.save_freq") or -1) <= 0:
        return Disk(0, 0)
    one = checkpoint_bytes(config, setup.actor.shape.parameters)
    if setup.actor.lora and "optimizer" in (
        select(config, "actor_rollout_ref.actor.checkpoint.save_contents") or []
    ):
        one -= 8 * (setup.actor.shape.parameters - setup.actor.trained)
    limits = [
        select(config, f"trainer.max_{name}_ckpt_to_keep")
        for name in ("actor", *(["critic"] if uses_critic(config) else []))
    ]
    return Disk(one, max(map(int, limits)) if all(limits) else None)
