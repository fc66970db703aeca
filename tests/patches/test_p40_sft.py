"""Proof of patches/verl/p40 on supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    import pandas as pd

    path = tmp_path / "train.parquet"
    rows = [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(8)]
    pd.DataFrame(rows).to_parquet(path)
    return path


def test_sft_trains_in_fp32(
    compose: Any,
    model_dir: Path,
    questions: Path,
    worker_config: Any,
    half_precision_ops: Any,
) -> None:
    """Two steps of the real SFT trainer make no half-precision tensor, and the loss falls."""
    from omegaconf import OmegaConf, open_dict
    from torch.distributed.device_mesh import init_device_mesh
    from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer, create_sft_dataset
    from verl.utils import hf_tokenizer
    from verl.workers.fsdp_workers import CriticWorker

    CriticWorker(worker_config().critic)  # starts the process group
    config = compose(
        f"model.partial_pretrain={model_dir}",
        "model.strategy=fsdp",  # fsdp2 needs CUDA streams in torch 2.6
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={questions}",
        f"data.val_files={questions}",
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=2",
        "data.max_length=64",
        "optim.lr=1e-2",
        "optim.warmup_steps_ratio=0",
        name="sft_trainer",
    )
    with open_dict(config):
        OmegaConf.resolve(config)
    dataset = create_sft_dataset(str(questions), config.data, hf_tokenizer(str(model_dir)))
    trainer = FSDPSFTTrainer(
        config=config,
        device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)),
        ulysses_device_mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp")),
        tokenizer=hf_tokenizer(str(model_dir)),
        train_dataset=dataset,
        val_dataset=dataset,
    )
    assert trainer.model.config._attn_implementation == "eager"
    from tensordict import TensorDict

    batch = next(iter(trainer.train_dataloader))
    with half_precision_ops:
        losses = [
            trainer.training_step(TensorDict(dict(batch), batch_size=4))["train/loss"]
            for _ in range(4)
        ]
    assert half_precision_ops.seen == []
    assert losses[-1] < losses[0]
