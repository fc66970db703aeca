"""Proofs of patches/verl/fix: upstream bugs on the way of every run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def test_hf_rollout_sharding_manager_has_timing(worker_config: Any, prompts: Any) -> None:
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(worker_config().actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    output = worker.generate_sequences(prompts)
    assert output.batch["responses"].shape == (4, 6)
    assert output.meta_info["timing"]["generate_sequences"] > 0


def test_chunked_entropy_takes_padded_logits() -> None:
    import torch
    from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking

    padded = torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(0))
    whole = entropy_from_logits(padded)
    for chunk_size in (1, 5, 2048):
        chunked = entropy_from_logits_with_chunking(padded, chunk_size)
        torch.testing.assert_close(chunked, whole)
    unpadded = padded.view(21, 50)
    torch.testing.assert_close(entropy_from_logits_with_chunking(unpadded, 4), whole.view(21))


def test_file_logger_keeps_full_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from verl.utils.tracking import Tracking

    path = tmp_path / "run" / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    logger = Tracking("project", "experiment", default_backend=["file"])
    logger.log({"actor/ppo_kl": 0.0004321, "count": np.int64(3)}, step=1)
    # the line is there at once: the reader is another process
    assert json.loads(path.read_text()) == {
        "step": 1,
        "data": {"actor/ppo_kl": 0.0004321, "count": 3},
    }
    logger.logger["file"].finish()
    # a resumed run goes on in the same file
    Tracking("project", "experiment", default_backend=["file"]).log({"loss": 0.5}, step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_checkpoint_tracker_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at the write: the tracker still names the last checkpoint."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo import ray_trainer
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("3")
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_4").mkdir()

    class Killed(BaseException):
        pass

    def open_and_die(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = Path(path).open(mode, *args, **kwargs)  # noqa: SIM115
        if "latest_checkpointed_iteration" in str(path) and "w" in mode:
            file.close()

            class DiesOnWrite:
                def __enter__(self) -> DiesOnWrite:
                    return self

                def __exit__(self, *_: object) -> None:
                    pass

                def write(self, _: str) -> None:
                    raise Killed

            return DiesOnWrite()
        return file

    monkeypatch.setattr(ray_trainer, "open", open_and_die, raising=False)
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(tmp_path),
                "default_hdfs_dir": None,
            }
        }
    )
    trainer.global_steps = 4
    trainer.use_critic = False
    trainer.actor_rollout_wg = SimpleNamespace(save_checkpoint=lambda *a, **k: None)
    trainer.train_dataloader = SimpleNamespace(state_dict=dict)
    with pytest.raises(Killed):
        trainer._save_checkpoint()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_3")


def test_offloaded_actor_is_loaded_for_the_hf_rollout(
    worker_config: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU there is nowhere to move, so the order of the moves is what can be seen."""
    from verl.workers import fsdp_workers

    worker = fsdp_workers.ActorRolloutRefWorker(
        worker_config("actor_rollout_ref.actor.fsdp_config.param_offload=True").actor_rollout_ref,
        role="actor_rollout",
    )
    worker.init_model()
    order: list[str] = []

    def record(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    record(fsdp_workers, "load_fsdp_model_to_gpu")
    record(fsdp_workers, "offload_fsdp_model_to_cpu")
    record(worker.rollout, "generate_sequences")
    worker.generate_sequences(prompts)
    assert order == ["load_fsdp_model_to_gpu", "generate_sequences", "offload_fsdp_model_to_cpu"]


@pytest.mark.parametrize("setting", [False, None])
def test_ray_dashboard_from_the_config(
    compose: Any, monkeypatch: pytest.MonkeyPatch, setting: bool | None
) -> None:
    import ray
    from verl.trainer.main_ppo import run_ppo

    class Asked(Exception):
        pass

    def take_down(**kwargs: Any) -> None:
        raise Asked(kwargs["include_dashboard"])

    monkeypatch.setattr(ray, "init", take_down)
    overrides = [] if setting is None else [f"ray_init.include_dashboard={setting}"]
    with pytest.raises(Asked) as asked:
        run_ppo(compose(*overrides))
    assert asked.value.args == (setting,)


def test_hf_rollout_generates_what_the_model_says(
    worker_config: Any, model_dir: Path, prompts: Any
) -> None:
    """Greedy decoding by the rollout is the argmax of whole forward passes, left padding or not."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(worker_config().actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    prompts.meta_info["do_sample"] = False
    responses = worker.generate_sequences(prompts).batch["responses"]
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    for row in range(4):
        real = prompts.batch["attention_mask"][row].bool()
        tokens = prompts.batch["input_ids"][row][real]
        for response_token in responses[row]:
            with torch.no_grad():
                expected = model(input_ids=tokens.unsqueeze(0)).logits[0, -1].argmax()
            assert response_token == expected
            if expected == model.generation_config.eos_token_id:
                break
            tokens = torch.cat([tokens, expected.unsqueeze(0)])
