"""Proofs of patches/verl/fix: upstream bugs on the way of every run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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


def test_chunked_entropy_takes_padded_logits(
    worker_config: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import verl.utils.torch_functional as verl_F
    from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking

    padded = torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(0))
    whole = entropy_from_logits(padded)
    for chunk_size in (1, 5, 2048):
        chunked = entropy_from_logits_with_chunking(padded, chunk_size)
        torch.testing.assert_close(chunked, whole)
    unpadded = padded.view(21, 50)
    torch.testing.assert_close(entropy_from_logits_with_chunking(unpadded, 4), whole.view(21))

    # The actor's padded path asks for it where the setting does, and gets the same numbers.
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    taken: list[tuple[int, ...]] = []

    def noted(logits: Any, *arguments: Any) -> Any:
        taken.append(tuple(logits.shape))
        return entropy_from_logits_with_chunking(logits, *arguments)

    monkeypatch.setattr(verl_F, "entropy_from_logits_with_chunking", noted)
    found = []
    for chunked in ("False", "True"):
        override = f"actor_rollout_ref.actor.entropy_from_logits_with_chunking={chunked}"
        actor = ActorRolloutRefWorker(worker_config(override).actor_rollout_ref, "actor_rollout")
        actor.init_model()
        assert not taken
        found.append(actor.compute_log_prob(batch).batch["entropys"])
    assert [shape[:2] for shape in taken] == [(2, 6), (2, 6)]
    torch.testing.assert_close(found[0], found[1])


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


def _save(trainer: Any) -> None:
    """As the training loop does it; the second half came with one of the patches."""
    trainer._save_checkpoint()
    getattr(trainer, "_commit_checkpoint", lambda: None)()


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
        _save(trainer)
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_3")


def test_a_failed_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """One checkpoint is kept, and the disk is full while its successor is being written."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo import ray_trainer

    full = False

    def save(path: str, *args: Any, **kwargs: Any) -> None:
        if full and path.endswith("critic"):
            raise OSError(28, "No space left on device", path)
        # verl's workers delete what they have been told not to keep, before they write.
        keep = kwargs["max_ckpt_to_keep"]
        if keep:
            for old in sorted(tmp_path.glob("global_step_*"))[: -keep + 1 or None]:
                shutil.rmtree(old / Path(path).name, ignore_errors=True)
        Path(path).mkdir(parents=True)
        (Path(path) / "model_world_size_1_rank_0.pt").touch()

    settings = {
        "default_local_dir": str(tmp_path),
        "default_hdfs_dir": None,
        "max_actor_ckpt_to_keep": 1,
        "max_critic_ckpt_to_keep": 1,
        "nnodes": 1,
    }
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = OmegaConf.create({"trainer": settings})
    trainer.use_critic = True
    trainer.actor_rollout_wg = trainer.critic_wg = SimpleNamespace(save_checkpoint=save)
    trainer.train_dataloader = SimpleNamespace(state_dict=dict)

    def saved() -> list[str]:
        """Every file of every checkpoint, however whole it is, that has a checkpoint's name."""
        files = [
            p
            for p in tmp_path.rglob("*.pt")
            if not p.relative_to(tmp_path).parts[0].endswith(".partial")
        ]
        return sorted(str(p.relative_to(tmp_path)) for p in files)

    def whole(step: int) -> list[str]:
        shard = "model_world_size_1_rank_0.pt"
        return [
            f"global_step_{step}/{name}"
            for name in (f"actor/{shard}", f"critic/{shard}", "data.pt")
        ]

    for step in (1, 2):
        trainer.global_steps = step
        _save(trainer)
    assert saved() == whole(2)
    trainer.global_steps, full = 3, True
    with pytest.raises(OSError, match="No space left"):
        _save(trainer)
    assert saved() == whole(2)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    trainer.global_steps, full = 4, False
    _save(trainer)
    assert saved() == whole(4)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["global_step_4"]


@pytest.mark.parametrize("rollout", ["hf", "vllm"], ids=["one unit", "a unit a layer"])
def test_a_checkpoint_copies_no_model_on_the_card(
    worker_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: str
) -> None:
    """Tensors go to the host without a copy beside them, and what was written is free at once."""
    import gc

    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    # verl makes the actor one FSDP unit for the HF rollout alone
    config = worker_config(f"actor_rollout_ref.rollout.name={rollout}").actor_rollout_ref
    worker = ActorRolloutRefWorker(config, role="actor")
    worker.init_model()
    written: dict[str, Any] = {}
    copied: list[tuple[int, ...]] = []
    clone, save = torch.Tensor.clone, torch.save

    def noted_clone(tensor: Any, *args: Any, **named: Any) -> Any:
        copied.append(tuple(tensor.shape))
        return clone(tensor, *args, **named)

    def noted_save(what: Any, path: Any, *args: Any) -> None:
        if "model_world_size" in str(path):
            assert copied == []
            written.update({k: StorageWeakRef(v.untyped_storage()) for k, v in what.items()})
        save(what, path, *args)

    monkeypatch.setattr(torch.Tensor, "clone", noted_clone)
    monkeypatch.setattr(torch, "save", noted_save)
    gc.disable()
    try:
        worker.save_checkpoint(str(tmp_path / "actor"), global_step=1)
        assert written
        assert all(storage.expired() for storage in written.values())
    finally:
        gc.enable()
    monkeypatch.undo()
    saved = torch.load(tmp_path / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    whole = worker.actor_module_fsdp.state_dict()
    assert set(saved) == set(whole)
    assert all(torch.equal(saved[name], tensor) for name, tensor in whole.items())
    tied = ("model.embed_tokens.weight", "lm_head.weight")
    assert len({saved[name].untyped_storage().data_ptr() for name in tied}) == 1


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


def test_lora_actor_with_the_hf_rollout(worker_config: Any, batch: Any, prompts: Any) -> None:
    """Load, rollout, log-prob with and without the adapters, an update that moves only them."""
    import torch
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    config = worker_config(
        "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.1"
    )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    assert worker.generate_sequences(prompts).batch["responses"].shape == (4, 6)
    before = worker.compute_log_prob(batch).batch["old_log_probs"].clone()
    batch.batch["old_log_probs"] = before
    batch.batch["advantages"] = torch.ones_like(before)
    batch.meta_info["global_token_num"] = [14] * 4
    worker.update_actor(batch)
    worker.generate_sequences(prompts)
    after = worker.compute_log_prob(batch).batch["old_log_probs"]
    assert not torch.allclose(before, after)
    # the reference is the model without its adapters, which has not moved
    reference = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
    torch.testing.assert_close(reference, before)


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


class _Rank:
    """One worker in place of Ray's worker group: the same calls, in this process."""

    world_size = 1

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def save_checkpoint(self, path: str, remote: Any, step: int, max_ckpt_to_keep: Any) -> None:
        self._worker.save_checkpoint(path, remote, step, max_ckpt_to_keep)


@pytest.fixture
def grpo(
    worker_config: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """verl's trainer with a real actor worker: five GRPO steps of two prompts, two samples each.

    ``grpo(on_reward=..., on_validation=..., **trainer settings)``: the callbacks get the count
    of training and validation batches scored so far.
    """
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import AutoTokenizer
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.dataset.rl_dataset import collate_fn
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv("VERL_STOP_FILE", str(tmp_path / "stop"))

    def make(on_reward: Any = None, on_validation: Any = None, **settings: Any) -> Any:
        config = worker_config(
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "data.train_batch_size=2",
            "trainer.logger=[file]",
            "trainer.val_before_train=False",
            "trainer.balance_batch=False",
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
            *(f"trainer.{name}={value}" for name, value in settings.items()),
        )
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
        worker.init_model()

        def prompt(row: int) -> dict[str, Any]:
            ids = torch.tensor([0] * 4 + [40 + row] * 4)
            mask = (ids != 0).long()
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            return {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": positions,
                "raw_prompt_ids": ids[4:].tolist(),
                "data_source": "numbers",
            }

        seen = {"train": 0, "test": 0}

        def reward(split: str, callback: Any) -> Any:
            def score(data: Any, return_dict: bool = False) -> Any:
                seen[split] += 1
                if callback:
                    callback(seen[split])
                scores = torch.zeros(data.batch["responses"].shape)
                scores[:, -1] = torch.arange(len(scores)).float()
                return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores

            return score

        trainer = object.__new__(RayPPOTrainer)
        trainer.config = config
        trainer.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        trainer.reward_fn = reward("train", on_reward)
        trainer.val_reward_fn = reward("test", on_validation)
        trainer.actor_rollout_wg = _Rank(worker)
        trainer.use_critic = trainer.use_rm = trainer.use_reference_policy = False
        trainer.async_rollout_mode = False
        trainer.total_training_steps = 5
        trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        rows = [prompt(row) for row in range(10)]
        loader = {"batch_size": 2, "collate_fn": collate_fn}
        trainer.train_dataloader = StatefulDataLoader(rows, **loader)
        trainer.val_dataloader = StatefulDataLoader(rows[:4], **loader)
        trainer.seen = seen
        return trainer

    return make


def _logged(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _validated(record: dict[str, Any]) -> bool:
    return any(name.startswith("val-") for name in record["data"])


def test_a_requested_stop_saves_the_step_and_returns(grpo: Any, tmp_path: Path) -> None:
    """Asked for in the middle of step 2 of 5, two prompts before the next validation."""

    def ask(step: int) -> None:
        if step == 2:
            (tmp_path / "stop").touch()

    trainer = grpo(on_reward=ask, save_freq=100, test_freq=1)
    trainer.fit()
    logged = _logged(tmp_path)
    assert [record["step"] for record in logged] == [1, 2]
    assert [_validated(record) for record in logged] == [True, False]
    assert "actor/pg_loss" in logged[1]["data"]
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert [path.name for path in checkpoints.glob("global_step_*")] == ["global_step_2"]
    assert (checkpoints / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt").is_file()


def test_a_checkpoint_counts_once_its_step_is_logged(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed between the two does the step again, instead of losing its metrics."""
    from verl.trainer.ppo import ray_trainer

    found = []
    commit = ray_trainer.commit_checkpoint

    def noted(partial: str, whole: str) -> None:
        steps = [record["step"] for record in _logged(tmp_path)]
        found.append((Path(whole).name, steps))
        commit(partial, whole)

    monkeypatch.setattr(ray_trainer, "commit_checkpoint", noted)
    grpo(save_freq=2, test_freq=-1).fit()
    assert found == [
        ("global_step_2", [1, 2]),
        ("global_step_4", [1, 2, 3, 4]),
        ("global_step_5", [1, 2, 3, 4, 5]),
    ]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_a_validation_is_left_when_a_stop_is_requested(grpo: Any, tmp_path: Path) -> None:
    """A validation of half the questions has no figures, and the step is saved all the same."""
    trainer = grpo(
        on_validation=lambda batch: (tmp_path / "stop").touch(), save_freq=100, test_freq=1
    )
    trainer.fit()
    assert trainer.seen == {"train": 1, "test": 1}
    assert [_validated(record) for record in _logged(tmp_path)] == [False]
    assert (tmp_path / "checkpoints" / "global_step_1" / "data.pt").is_file()


def test_a_stop_saves_nothing_where_checkpoints_are_off(grpo: Any, tmp_path: Path) -> None:
    trainer = grpo(on_reward=lambda step: (tmp_path / "stop").touch(), save_freq=-1, test_freq=-1)
    trainer.fit()
    assert [record["step"] for record in _logged(tmp_path)] == [1]
    assert not (tmp_path / "checkpoints").exists()


def test_without_a_request_every_step_is_trained(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_STOP_FILE")
    grpo(save_freq=-1, test_freq=-1).fit()
    assert [record["step"] for record in _logged(tmp_path)] == [1, 2, 3, 4, 5]


_CLOCK = ("timing", "perf/")
"""Metrics that a clock or the machine's memory decides."""


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(grpo: Any, tmp_path: Path) -> None:
    """Stopped in the middle of its second epoch, in another process than the one that goes on."""
    import torch
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.main_ppo import create_rl_sampler
    from verl.trainer.ppo.core_algos import AdaptiveKLController
    from verl.utils.dataset.rl_dataset import collate_fn

    data = OmegaConf.create({"shuffle": True, "seed": 1})
    rolled_out: list[list[Any]] = []

    def train(seed: int, steps: int, kl_coef: float) -> Any:
        torch.manual_seed(seed)
        trainer = grpo(save_freq=7, test_freq=-1, total_epochs=3)
        rows = trainer.train_dataloader.dataset
        trainer.train_dataloader = StatefulDataLoader(
            rows,
            batch_size=2,
            collate_fn=collate_fn,
            sampler=create_rl_sampler(data, rows),
            # verl's loader draws from the driver's generator, which here is the worker's too.
            generator=torch.Generator(),
        )
        score = trainer.reward_fn

        def scored(batch: Any, return_dict: bool = False) -> Any:
            rolled_out.append(batch.batch["responses"].tolist() + batch.batch["prompts"].tolist())
            return score(batch, return_dict)

        trainer.reward_fn = scored
        trainer.total_training_steps = steps
        trainer.kl_ctrl_in_reward = AdaptiveKLController(kl_coef, 6.0, 100)
        trainer.fit()
        return trainer

    train(1, 12, 0.1)
    whole = [_comparable(record) for record in _logged(tmp_path)]
    whole_rolled_out = list(rolled_out)
    for name in ("metrics.jsonl", "checkpoints"):
        shutil.move(tmp_path / name, tmp_path / f"whole-{name}")
    rolled_out.clear()
    train(1, 7, 0.3)
    resumed = train(2, 12, 0.1)
    assert [_comparable(record) for record in _logged(tmp_path)] == whole
    assert rolled_out == whole_rolled_out
    assert [record["training/epoch"] for record in whole] == [0] * 5 + [1] * 5 + [2] * 2
    assert resumed.kl_ctrl_in_reward.value == 0.3


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record["data"].items() if not k.startswith(_CLOCK)}
