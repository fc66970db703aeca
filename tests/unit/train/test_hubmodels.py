"""Hub names in a config, and the folders that take their place for the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.cli import main
from verl_p40.train import hubmodels, source
from verl_p40.train.compose import compose, from_yaml, select

NAME = "Qwen/Qwen2.5-0.5B-Instruct"


def config(verl_config: Path, *overrides: str, preset: str = "p40-ppo"):  # type: ignore[no-untyped-def]
    return compose(preset, overrides, verl_config).config


def test_actor_and_critic_share_the_name(verl_config: Path) -> None:
    found = hubmodels.settings(config(verl_config))
    assert set(found.values()) == {NAME}
    assert {"actor_rollout_ref.model.path", "critic.model.path"} <= set(found)
    grpo = hubmodels.settings(config(verl_config, "algorithm.adv_estimator=grpo"))
    assert set(grpo) == {"actor_rollout_ref.model.path"}
    assert hubmodels.settings(config(verl_config, preset="cpu-demo")) == {}


def test_a_reward_model_counts_when_it_is_used(verl_config: Path) -> None:
    overrides = ["reward_model.enable=true", "reward_model.model.path=me/judge"]
    found = hubmodels.settings(config(verl_config, *overrides))
    assert found["reward_model.model.path"] == "me/judge"
    assert "reward_model.model.path" not in hubmodels.settings(config(verl_config, overrides[1]))


def test_folders_take_the_place_of_names(verl_config: Path) -> None:
    before = config(verl_config)
    folders = dict.fromkeys(hubmodels.settings(before), Path("/models/q"))
    after = hubmodels.substituted(before, folders)
    assert select(after, "critic.model.path") == "/models/q"
    assert select(before, "critic.model.path") == NAME


@pytest.mark.parametrize("folder", ["/m/models--Qwen--Q/snapshots/0a", "/my models/it's, a=b"])
def test_hydra_reads_the_override_back(verl_config: Path, folder: str) -> None:
    (override,) = hubmodels.overrides({"actor_rollout_ref.model.path": Path(folder)})
    again = config(verl_config, override)
    assert select(again, "actor_rollout_ref.model.path") == folder


def test_a_dry_run_shows_a_mounted_model_and_keeps_its_name(
    tmp_path: Path,
    verl_config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "config_folder", lambda stack, say=None: verl_config)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def dry_run() -> dict:  # type: ignore[type-arg]
        with pytest.raises(SystemExit) as done:
            main.run(["train", "p40-ppo", "--dry-run", "--json"])
        assert not done.value.code
        return dict(json.loads(capsys.readouterr().out))

    without = dry_run()
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    with_it = dry_run()
    assert f"actor_rollout_ref.model.path={folder}" in with_it["command"]
    assert f"critic.model.path={folder}" in with_it["command"]
    # The same run, wherever the model lies.
    assert with_it["run"] == without["run"]
    assert with_it["config"] == without["config"]
    assert select(from_yaml(json.dumps(with_it["config"])), "critic.model.path") == NAME
