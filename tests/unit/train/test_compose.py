from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_p40.errors import UsageError
from verl_p40.train import catalog
from verl_p40.train.compose import (
    assign,
    compose,
    differing_keys,
    digest,
    from_yaml,
    nearest_keys,
    select,
    to_yaml,
)


@pytest.mark.parametrize("name", catalog.names())
def test_every_preset_is_fp32_eager_and_uncompiled(name: str, verl_config: Path) -> None:
    config = compose(name, [], verl_config).config
    assert select(config, "actor_rollout_ref.rollout.dtype") == "float32"
    rollout = "vllm" if name.endswith("-vllm") else "hf"
    assert select(config, "actor_rollout_ref.rollout.name") == rollout
    assert select(config, "actor_rollout_ref.rollout.enable_prefix_caching") is False
    for model in ("actor_rollout_ref.model", "critic.model"):
        assert select(config, f"{model}.override_config.attn_implementation") == "eager"
    for section in (
        "actor_rollout_ref.actor.fsdp_config",
        "actor_rollout_ref.ref.fsdp_config",
        "critic.model.fsdp_config",
    ):
        assert select(config, f"{section}.model_dtype") == "fp32"
        precision = select(config, f"{section}.mixed_precision")
        assert precision == dict.fromkeys(["param_dtype", "reduce_dtype", "buffer_dtype"], "fp32")
    assert select(config, "actor_rollout_ref.actor.use_torch_compile") is False
    assert select(config, "actor_rollout_ref.ref.use_torch_compile") is False
    assert "file" in select(config, "trainer.logger")


def test_nothing_is_left_to_resolve(verl_config: Path) -> None:
    config = compose("p40-ppo", [], verl_config).config
    assert "${" not in to_yaml(config)
    assert select(config, "critic.ppo_mini_batch_size") == 32


def test_files_are_absolute_and_follow_the_data_folder(
    verl_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose("cpu-demo", ["data.val_files=[a.parquet,'~/b.parquet']"], verl_config).config
    assert select(config, "data.train_files") == str(tmp_path / "data/demo/train.parquet")
    assert select(config, "data.val_files") == [
        str(tmp_path / "a.parquet"),
        str(Path.home() / "b.parquet"),
    ]


def test_a_hub_name_stays_wherever_the_model_lies(verl_config: Path, tmp_path: Path) -> None:
    """So that a run is the same run with a copy and without (see test_hubmodels)."""
    copy = tmp_path / "models" / "Qwen2.5-0.5B-Instruct"
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    composed = compose("p40-ppo", [], verl_config).config
    for key in ("actor_rollout_ref.model.path", "critic.model.path"):
        assert select(composed, key) == "Qwen/Qwen2.5-0.5B-Instruct"


def test_overrides_of_every_kind(verl_config: Path) -> None:
    overrides = [
        "trainer.total_epochs=3",
        "+data.new=1",
        "++data.newer=[1,2]",
        "++data.shuffle=false",
        "~trainer.ray_wait_register_center_timeout",
        "actor_rollout_ref.rollout.n=4",
    ]
    config = compose("cpu-demo", overrides, verl_config).config
    assert select(config, "trainer.total_epochs") == 3
    assert select(config, "data.new") == 1
    assert select(config, "data.newer") == [1, 2]
    assert select(config, "data.shuffle") is False
    assert select(config, "trainer.ray_wait_register_center_timeout") is None
    assert select(config, "critic.rollout_n") == 4


@pytest.mark.parametrize(
    ("override", "said", "fix"),
    [
        ("data.trian_batch_size=1", "nearest: data.train_batch_size", "+data.trian_batch_size=1"),
        ("actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr", ""),
        ("trainer.steps=5", "trainer.total_training_steps", ""),
        ("~trainer.total_epoch", "nearest: trainer.total_epochs", ""),
        ("+trainer.nnodes=1", "already at 'trainer.nnodes'", ""),
        ("trainer.nnodes=1,2", "sweep", ""),
        ("trainer", "not key=value", ""),
        ("data.train_batch_size=[1", "not key=value", ""),
        ("data=none", "data", ""),
    ],
)
def test_a_bad_override_is_one_line(verl_config: Path, override: str, said: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        compose("cpu-demo", [override], verl_config)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert fix in caught.value.fix


def test_a_preset_of_ones_own_builds_on_ours(verl_config: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults: [cpu-demo, _self_]\n"
        "verl_p40: {description: my very own, shown: planned only, data: none, model: m}\n"
        "trainer: {total_training_steps: 7}\n"
    )
    composed = compose(str(mine), [], verl_config)
    assert composed.preset == "mine"
    assert composed.source == str(mine)
    assert select(composed.config, "trainer.total_training_steps") == 7
    assert select(composed.config, "trainer.device") == "cpu"


def test_the_digest_is_of_what_is_computed(verl_config: Path) -> None:
    plain = compose("cpu-demo", [], verl_config).config
    batch = select(plain, "data.train_batch_size")
    same = compose("cpu-demo", [f"data.train_batch_size={batch}"], verl_config).config
    told = compose(
        "cpu-demo", ["verl_p40.description='another text'", "ray_init.num_cpus=9"], verl_config
    ).config
    other = compose("cpu-demo", ["actor_rollout_ref.actor.optim.lr=1e-5"], verl_config).config
    assert digest(plain) == digest(same) == digest(told)
    assert digest(plain) != digest(other)
    assert differing_keys(plain, other) == ["actor_rollout_ref.actor.optim.lr"]


def test_composing_leaves_the_environment_as_it_was(
    verl_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_P40_DATA")
    compose("cpu-demo", [], verl_config)
    assert "VERL_P40_DATA" not in os.environ


def test_yaml_keeps_text_that_looks_like_an_interpolation() -> None:
    config = {"a": "${b} and more", "b": {"c": [1, 2.5, None, True, "1e-3"]}}
    assert from_yaml(to_yaml(config)) == config
    # As hydra reads it in the trainer.
    loaded = OmegaConf.to_container(OmegaConf.create(to_yaml(config)), resolve=True)
    assert loaded == config


def test_assign_makes_sections() -> None:
    config: dict[str, object] = {}
    assign(config, "a.b.c", 1)
    assert config == {"a": {"b": {"c": 1}}}
    assert select(config, "a.b.d", "none") == "none"


def test_nearest_keys_prefer_the_same_last_part() -> None:
    known = ["a.optim.lr", "b.optim.lr", "a.batch_size", "x.y"]
    assert nearest_keys("a.optm.lr", known)[0] == "a.optim.lr"
    assert nearest_keys("zzz", known) == []
