"""Proofs of patches/verl/p40 on what leaves a run: exports keep FP32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def saved_actor(worker_config: Any, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of an actor, as shards and as a HF model, and the weights it must hold."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    config = worker_config(
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    )
    actor = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    actor.init_model()
    folder = tmp_path / "actor"
    actor.save_checkpoint(str(folder), global_step=1)
    with FSDP.summon_full_params(actor.actor_module_fsdp):
        weights = {name: weight.clone() for name, weight in actor.actor_module.state_dict().items()}
    return folder, weights


def check_model(folder: Path, weights: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"
    # "auto" is what vLLM and most users take
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)


def test_hf_export_keeps_fp32(saved_actor: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = saved_actor
    check_model(folder / "huggingface", weights)


def test_merger_keeps_fp32(saved_actor: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, weights = saved_actor
    target = tmp_path / "merged"
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    done = subprocess.run(
        [*command, "--local_dir", str(folder), "--target_dir", str(target)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check_model(target, weights)
