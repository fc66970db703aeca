"""Each trap: what would have failed minutes later is refused, and the fix it names is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_p40.errors import UsageError
from verl_p40.train.compose import compose
from verl_p40.train.traps import check_traps, explain

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LORA = "actor_rollout_ref.model.lora_rank=8"
VLLM = f"{ROLLOUT}.name=vllm"


@pytest.fixture(scope="module")
def config_of(verl_config: Path) -> Any:
    return lambda preset, *overrides: compose(preset, overrides, verl_config).config


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("p40-ppo", ("data.train_batch_size=3", "trainer.n_gpus_per_node=2"), "divide among 2"),
        ("p40-ppo", (f"+{ROLLOUT}.micro_batch_size=10",), "unequal"),
        ("p40-ppo", (VLLM, f"{ROLLOUT}.max_num_batched_tokens=511"), "max_num_batched_tokens"),
        ("p40-ppo", (VLLM, f"{ROLLOUT}.max_model_len=300"), "max_model_len"),
        ("p40-ppo", (LORA, VLLM), "LoRA kernels"),
        ("p40-ppo", (LORA, f"{ACTOR}.strategy=fsdp2"), "fsdp2"),
        ("p40-ppo", (LORA, "trainer.n_gpus_per_node=2"), "single worker"),
        ("cpu-demo", (f"{ACTOR}.strategy=fsdp2",), "CPU"),
        ("p40-ppo", (f"{ROLLOUT}.dtype=bfloat16",), "BF16"),
        ("p40-ppo", (f"{ROLLOUT}.dtype=auto",), "auto takes"),
        ("p40-ppo", (VLLM, f"{ROLLOUT}.mode=async"), "V1 engine"),
        ("p40-ppo", (VLLM, f"{ROLLOUT}.top_k=0"), "top-k is -1"),
        ("p40-ppo", (VLLM, f"{ROLLOUT}.val_kwargs.top_k=0"), "top-k is -1"),
    ],
)
def test_what_cannot_work_is_refused_and_its_fix_works(
    config_of: Any, preset: str, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check_traps(config_of(preset, *overrides))
    fixes = caught.value.fix.split()
    fixed = {text.split("=")[0]: text for text in (*overrides, *fixes)}
    check_traps(config_of(preset, *fixed.values()))


def test_positions_are_read_from_the_model(config_of: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 400}))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    with pytest.raises(UsageError, match="400 positions") as caught:
        check_traps(config_of("p40-ppo", model))
    assert caught.value.fix == "data.max_response_length=144"
    check_traps(config_of("p40-ppo", model, caught.value.fix))
    scaled = {"max_position_embeddings": 400, "rope_scaling": {"rope_type": "yarn"}}
    (tmp_path / "config.json").write_text(json.dumps(scaled))
    check_traps(config_of("p40-ppo", model))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{ROLLOUT}.dtype=half",), "1/64"),
        (("data.val_batch_size=null",), "whole validation set"),
        ((f"{ACTOR}.fsdp_config.param_offload=true",), "frees no GPU memory"),
    ],
)
def test_what_is_seldom_meant_is_said(
    config_of: Any, overrides: tuple[str, ...], words: str
) -> None:
    assert any(words in text for text in check_traps(config_of("p40-ppo", *overrides)))


def test_several_mini_batches_and_cards_say_nothing(config_of: Any) -> None:
    config = config_of(
        "p40-ppo",
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.fsdp_config.param_offload=true",
        "trainer.n_gpus_per_node=2",
    )
    assert check_traps(config) == []


def test_param_offload_with_the_hf_rollout_is_fixed_by_a_patch() -> None:
    """The trap that needs no refusal: the queue loads the weights before the rollout."""
    from verl_p40.patches.queue import load_queue

    assert any("hf-rollout-param-offload" in patch.name for patch in load_queue().patches)


def test_what_looks_like_a_fault_and_is_none(config_of: Any) -> None:
    assert any("ppo_kl" in note for note in explain(config_of("p40-ppo")))
    assert not explain(config_of("p40-ppo", f"{ACTOR}.ppo_mini_batch_size=16"))
