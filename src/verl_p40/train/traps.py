"""Settings that are legal one by one and fail, or do nothing, together: found before anything loads.

Each names where verl 0.4.1, vLLM 0.8.5 or FSDP would have stopped, minutes later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_p40.errors import UsageError
from verl_p40.train.compose import select

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def check_traps(config: Mapping[str, Any]) -> list[str]:
    """Check combinations of settings.

    Returns:
        Warnings: what works, and is seldom meant.

    Raises:
        UsageError: what cannot work, with the override that can.
    """
    _check_rollout_batch(config)
    _check_lengths(config)
    _check_lora(config)
    _check_fsdp2(config)
    warnings = _check_rollout_dtype(config)
    warnings += _check_vllm(config)
    warnings += _check_validation(config)
    warnings += _check_offload(config)
    return warnings


def _cuda(config: Mapping[str, Any]) -> bool:
    return bool(select(config, "trainer.device") == "cuda")


def _workers(config: Mapping[str, Any]) -> int:
    return int(select(config, "trainer.n_gpus_per_node")) * int(select(config, "trainer.nnodes"))


def _check_rollout_batch(config: Mapping[str, Any]) -> None:
    """Prompts go to the workers before they are repeated, and a worker's in equal chunks.

    ``DataProto.chunk`` asserts it: in the dispatch to workers, and in ``HFRollout``.
    """
    workers, batch = _workers(config), int(select(config, "data.train_batch_size"))
    if batch % workers:
        raise UsageError(
            f"data.train_batch_size ({batch}) does not divide among {workers} workers: a rollout "
            "gets whole prompts",
            fix=f"data.train_batch_size={-(-batch // workers) * workers}",
        )
    chunk = select(config, f"{_ROLLOUT}.micro_batch_size")
    if select(config, f"{_ROLLOUT}.name") != "hf" or not chunk:
        return
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise UsageError(f"{_ROLLOUT}.micro_batch_size is {chunk!r}, and must be a whole number")
    each = batch // workers
    parts = max(each // chunk, 1)
    if each % parts:
        fits = max(m for m in range(1, chunk + 1) if each % m == 0)
        raise UsageError(
            f"{_ROLLOUT}.micro_batch_size ({chunk}) cuts a worker's {each} prompts into {parts} "
            "unequal parts",
            fix=f"+{_ROLLOUT}.micro_batch_size={fits}",
        )


def _check_lengths(config: Mapping[str, Any]) -> None:
    """Prompt and response have to fit the model, and what vLLM is told of it."""
    prompt = int(select(config, "data.max_prompt_length"))
    whole = prompt + int(select(config, "data.max_response_length"))
    positions = _positions(str(select(config, "actor_rollout_ref.model.path")))
    if positions is not None and whole > positions:
        raise UsageError(
            f"data.max_prompt_length + max_response_length is {whole}, and the model was made for "
            f"{positions} positions (max_position_embeddings)",
            fix=f"data.max_response_length={positions - prompt}"
            if positions > prompt
            else f"data.max_prompt_length={positions // 2} data.max_response_length={positions // 2}",
        )
    if select(config, f"{_ROLLOUT}.name") != "vllm":
        return
    longest = select(config, f"{_ROLLOUT}.max_model_len")
    if longest is not None and int(longest) < whole:
        raise UsageError(
            f"{_ROLLOUT}.max_model_len ({longest}) is less than prompt + response ({whole})",
            fix=f"{_ROLLOUT}.max_model_len=null",
        )
    budget = select(config, f"{_ROLLOUT}.max_num_batched_tokens")
    need = int(longest or whole)
    if budget is not None and int(budget) < need:
        raise UsageError(
            f"{_ROLLOUT}.max_num_batched_tokens ({budget}) is less than a whole sequence ({need}), "
            "and vLLM refuses that",
            fix=f"{_ROLLOUT}.max_num_batched_tokens={need}",
        )


def _positions(model: str) -> int | None:
    """``max_position_embeddings`` of a local model; None without one, or with scaled positions."""
    file = Path(model) / "config.json"
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the model's own check says what is wrong with the file
    if not isinstance(raw, dict) or raw.get("rope_scaling"):
        return None
    value = raw.get("max_position_embeddings")
    return value if isinstance(value, int) else None


def _check_lora(config: Mapping[str, Any]) -> None:
    """LoRA: with the HF rollout, fsdp and one worker; with vLLM, not in FP32.

    fsdp2: peft's ``generate`` goes around the root's hooks ("aten.embedding.default got mixed
    torch.Tensor and DTensor", seen on an H200). Several workers: the units of fix/0009 gather
    weights in every step of a rollout, and the workers' rollouts end at different steps. vLLM 0.8.5
    asserts FP16 or BF16 in its LoRA kernels (docs/kernels.md).
    """
    if not int(select(config, "actor_rollout_ref.model.lora_rank") or 0):
        return
    if select(config, f"{_ROLLOUT}.name") == "vllm":
        if select(config, f"{_ROLLOUT}.dtype") == "float32":
            raise UsageError(
                "LoRA with the vLLM rollout does not work in float32: vLLM's LoRA kernels take "
                "FP16 and BF16 only",
                fix=f"{_ROLLOUT}.name=hf",
            )
        return
    if select(config, f"{_ACTOR}.strategy") == "fsdp2":
        raise UsageError(
            "LoRA with the HF rollout does not work with strategy fsdp2: peft generates around "
            "the hooks that gather the weights",
            fix=f"{_ACTOR}.strategy=fsdp",
        )
    if _workers(config) > 1:
        raise UsageError(
            "LoRA with the HF rollout needs a single worker: rollouts of different length would "
            "wait for one another for ever",
            fix="trainer.n_gpus_per_node=1 trainer.nnodes=1",
        )


def _check_fsdp2(config: Mapping[str, Any]) -> None:
    """fsdp2 of torch 2.6 records CUDA events ('Stream' object has no attribute 'record_event')."""
    if _cuda(config):
        return
    for key in (f"{_ACTOR}.strategy", "critic.strategy"):
        if select(config, key) == "fsdp2":
            raise UsageError(f"{key}=fsdp2 does not run on the CPU in torch 2.6", fix=f"{key}=fsdp")


def _check_rollout_dtype(config: Mapping[str, Any]) -> list[str]:
    dtype = str(select(config, f"{_ROLLOUT}.dtype"))
    if not _cuda(config) or dtype in ("float32", "fp32", "float"):
        return []
    if dtype in ("half", "float16", "fp16"):
        return [
            f"{_ROLLOUT}.dtype={dtype}: a P40 computes FP16 at 1/64 of FP32's rate; float32 is "
            "what it is for"
        ]
    raise UsageError(
        f"{_ROLLOUT}.dtype={dtype} is BF16, which no card before Ampere has"
        + (" (auto takes the dtype of the model's config)" if dtype == "auto" else ""),
        fix=f"{_ROLLOUT}.dtype=float32",
    )


def _check_vllm(config: Mapping[str, Any]) -> list[str]:
    """vLLM's AsyncLLM is its V1 engine, which takes no float32 on any card, and no card before 8.0.

    "No top-k" is -1; ``SamplingParams`` refuses 0, which only the HF rollout takes for it.
    """
    if select(config, f"{_ROLLOUT}.name") != "vllm":
        return []
    for key in (f"{_ROLLOUT}.top_k", f"{_ROLLOUT}.val_kwargs.top_k"):
        if select(config, key) == 0:
            raise UsageError(f"{key}=0: vLLM's word for no top-k is -1", fix=f"{key}=-1")
    if (
        select(config, f"{_ROLLOUT}.mode") == "async"
        and select(config, f"{_ROLLOUT}.dtype") == "float32"
    ):
        raise UsageError(
            f"{_ROLLOUT}.mode=async is vLLM's V1 engine, which does not take float32",
            fix=f"{_ROLLOUT}.mode=sync",
        )
    return []


def _check_validation(config: Mapping[str, Any]) -> list[str]:
    """Without a batch size the whole validation set is one batch, which HF generates at once."""
    validates = int(select(config, "trainer.test_freq") or -1) > 0 or bool(
        select(config, "trainer.val_before_train")
    )
    if (
        validates
        and _cuda(config)
        and select(config, f"{_ROLLOUT}.name") == "hf"
        and select(config, "data.val_batch_size") is None
        and not select(config, f"{_ROLLOUT}.micro_batch_size")
    ):
        batch = select(config, "data.train_batch_size")
        return [
            "data.val_batch_size is not set, so the HF rollout generates for the whole validation "
            f"set at once; data.val_batch_size={batch} takes what a training rollout takes"
        ]
    return []


def _check_offload(config: Mapping[str, Any]) -> list[str]:
    """On one card fsdp's param_offload copies, and frees nothing (plan.models_memory.resident)."""
    if not _cuda(config) or _workers(config) > 1:
        return []
    if select(config, f"{_ACTOR}.strategy") == "fsdp" and select(
        config, f"{_ACTOR}.fsdp_config.param_offload"
    ):
        return [
            f"{_ACTOR}.fsdp_config.param_offload frees no GPU memory on a single card (FSDP keeps "
            "views of the weights there); false saves the copies"
        ]
    return []


def explain(config: Mapping[str, Any]) -> list[str]:
    """What looks like a fault in the metrics of this config and is none.

    With one update a step the policy is the one that sampled: the ratio is 1 throughout.
    """
    mini = select(config, f"{_ACTOR}.ppo_mini_batch_size")
    if (
        mini == select(config, "data.train_batch_size")
        and select(config, f"{_ACTOR}.ppo_epochs") == 1
    ):
        return [
            "one mini batch a step: actor/ppo_kl and pg_clipfrac are 0 by construction, which is "
            "no fault; the distance to the reference is actor/reward_kl_penalty or actor/kl_loss"
        ]
    return []
