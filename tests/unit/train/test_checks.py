from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_p40.errors import DiskError, MachineError, UsageError
from verl_p40.train import catalog, checks
from verl_p40.train.compose import assign, compose


@pytest.fixture(scope="module")
def demo(verl_config: Path) -> dict[str, Any]:
    """The demo at a batch of its own, so that tuning the preset leaves these tests alone."""
    sizes = [
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "critic.ppo_micro_batch_size_per_gpu=32",
        "trainer.total_training_steps=60",
        "trainer.save_freq=10",
    ]
    return compose("cpu-demo", sizes, verl_config).config


def _with(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        assign(changed, key.replace("__", "."), value)
    return changed


ACTOR = "actor_rollout_ref__actor__"
ROLLOUT = "actor_rollout_ref__rollout__"


@pytest.mark.parametrize("name", catalog.names())
def test_presets_pass(name: str, verl_config: Path) -> None:
    assert checks.check_batches(compose(name, [], verl_config).config) == []


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        ({"data__train_batch_size": 16}, "larger than data.train_batch_size (16)", "=16"),
        (
            {f"{ACTOR}ppo_micro_batch_size_per_gpu": 5},
            "does not divide the mini batch of 32",
            "ppo_micro_batch_size_per_gpu=4",
        ),
        (
            {f"{ACTOR}ppo_micro_batch_size_per_gpu": 64},
            "does not divide the mini batch of 32",
            "ppo_micro_batch_size_per_gpu=32",
        ),
        ({"critic__ppo_micro_batch_size_per_gpu": 7}, "critic.ppo_micro_batch_size_per_gpu", "=8"),
        ({f"{ACTOR}ppo_micro_batch_size": 4}, "both set", "=null"),
        ({f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": None}, "is not set", "=1"),
        ({"trainer__n_gpus_per_node": 3}, "does not divide among 3 workers", "=33"),
        ({f"{ROLLOUT}tensor_model_parallel_size": 2}, "does not divide the number of workers", "1"),
        ({"data__train_batch_size": 0}, "at least 1", ""),
        ({"data__train_batch_size": "many"}, "at least 1", ""),
    ],
)
def test_what_verl_would_assert(
    demo: dict[str, Any], settings: dict[str, Any], said: str, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        checks.check_batches(_with(demo, **settings))
    assert said in caught.value.message
    assert fix in caught.value.fix


def test_samples_multiply_the_mini_batch(demo: dict[str, Any]) -> None:
    """8 prompts x 4 samples: 5 never fits, 16 does though it is more than the 8 prompts."""
    settings = {
        "data__train_batch_size": 8,
        f"{ACTOR}ppo_mini_batch_size": 8,
        "critic__ppo_mini_batch_size": 8,
        f"{ROLLOUT}n": 4,
    }
    assert checks.check_batches(_with(demo, **settings)) == []
    fits = {**settings, f"{ACTOR}ppo_micro_batch_size_per_gpu": 16}
    assert checks.check_batches(_with(demo, **fits)) == []


def test_without_a_critic_its_sizes_do_not_matter(demo: dict[str, Any]) -> None:
    settings = {"algorithm__adv_estimator": "grpo", "critic__ppo_micro_batch_size_per_gpu": 7}
    assert checks.check_batches(_with(demo, **settings)) == []


def test_an_uneven_batch_is_a_warning(demo: dict[str, Any]) -> None:
    (warning,) = checks.check_batches(_with(demo, data__train_batch_size=40))[:1]
    assert "not a multiple" in warning


def test_dynamic_batches_need_no_micro_size(demo: dict[str, Any]) -> None:
    settings = {
        f"{ACTOR}use_dynamic_bsz": True,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": None,
        f"{ROLLOUT}log_prob_use_dynamic_bsz": True,
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": None,
    }
    assert checks.check_batches(_with(demo, **settings)) == []


def test_a_gpu_preset_without_a_gpu_names_the_cpu_one(
    verl_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("p40-ppo", [], verl_config).config
    monkeypatch.setattr(checks, "cuda_devices", lambda: 0)
    with pytest.raises(MachineError, match="no CUDA device") as caught:
        checks.check_device(config, "p40-ppo")
    assert "verl-p40 train cpu-demo" in caught.value.fix
    monkeypatch.setattr(checks, "cuda_devices", lambda: 1)
    checks.check_device(config, "p40-ppo")
    with pytest.raises(MachineError, match="has 1 CUDA device"):
        checks.check_device(_with(config, trainer__n_gpus_per_node=2), "p40-ppo")
    with pytest.raises(UsageError, match="'tpu'"):
        checks.check_device(_with(config, trainer__device="tpu"), "p40-ppo")


def test_steps_beyond_the_data(demo: dict[str, Any]) -> None:
    config = _with(demo, trainer__total_training_steps=60, trainer__total_epochs=2)
    with pytest.raises(UsageError, match=r"ends at step 20 \(10 steps an epoch\)") as caught:
        checks.check_steps(config, rows=330)
    assert caught.value.fix == "trainer.total_epochs=6"
    checks.check_steps(_with(config, trainer__total_epochs=6), rows=330)
    with pytest.raises(UsageError, match="31 usable rows"):
        checks.check_steps(config, rows=31)


def test_steps_follow_from_the_data_when_none_are_set(demo: dict[str, Any]) -> None:
    config = _with(demo, trainer__total_training_steps=None, trainer__total_epochs=3)
    assert checks.planned_steps(config, rows=70) == 6
    checks.check_steps(config, rows=70)


def _model(folder: Path, shapes: dict[str, list[int]]) -> Path:
    """A safetensors file with that header and no data: only the header is read."""
    folder.mkdir()
    tensors = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_parameters_and_checkpoint_size(demo: dict[str, Any], tmp_path: Path) -> None:
    model = _model(tmp_path / "m", {"a": [1000, 500], "b": [7], "scalar": []})
    assert checks.count_parameters(model) == 500_008
    assert checks.checkpoint_bytes(demo, 1000) == 2 * 12 * 1000
    grpo = _with(demo, algorithm__adv_estimator="grpo")
    assert checks.checkpoint_bytes(grpo, 1000) == 12 * 1000
    lean = _with(grpo, actor_rollout_ref__actor__checkpoint__save_contents=["model"])
    assert checks.checkpoint_bytes(lean, 1000) == 4 * 1000


def test_a_full_disk_is_told_before_the_start(
    demo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(tmp_path / "m", {"a": [1_000_000_000]})
    config = _with(demo, actor_rollout_ref__model__path=str(model))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        checks.shutil, "disk_usage", lambda place: usage._replace(free=30_000_000_000)
    )
    with pytest.raises(DiskError, match=r"3 checkpoint\(s\) need about 72.5 GB .* 30.0 GB free"):
        checks.check_disk(config, tmp_path / "runs" / "x", steps=60)
    assert checks.check_disk(config, tmp_path, steps=10) == 24_500_000_000
    assert checks.check_disk(_with(config, trainer__save_freq=-1), tmp_path, steps=60) == 0
    unlimited = _with(config, trainer__max_actor_ckpt_to_keep=None)
    with pytest.raises(DiskError, match=r"6 checkpoint\(s\)"):
        checks.check_disk(unlimited, tmp_path, steps=60)
