"""A model by its name on the hub: downloaded once before training, then needing no network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Cli

sys.path.append(str(Path(__file__).parents[1] / "unit" / "data"))

from hubserver import Hub, serving

NAME = "me/tiny"


def test_a_hub_model_trains_and_is_the_same_run_offline(
    cli: Cli, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    files = {path.name: path.read_bytes() for path in (assets / "model").iterdir()}
    words = (
        str(cli.preset),
        f"actor_rollout_ref.model.path={NAME}",
        f"critic.model.path={NAME}",
        "trainer.total_training_steps=2",
    )
    with serving(Hub({}, {NAME: files})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = cli.run(*words)
    assert done.returncode == 0, done.stdout
    assert f"downloading {NAME} from {hub.url}" in done.stdout
    # Once, though actor, reference, rollout and critic load it.
    weights = [line for line in hub.requests if line.startswith("GET ") and "safetensors" in line]
    assert len(weights) == 1
    (run,) = cli.runs.iterdir()
    assert f"path: {NAME}" in (run / "config.yaml").read_text()
    command = json.loads((run / "env.json").read_text())["command"]
    assert any(w.startswith(f"actor_rollout_ref.model.path={tmp_path}/hf/hub/") for w in command)
    # The hub is gone, and the same command means the same run.
    again = cli.run(*words)
    assert again.returncode == 0, again.stdout
    assert "already finished" in again.stdout


def test_no_hub_and_no_copy_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    done = cli.run(str(cli.preset), f"actor_rollout_ref.model.path={NAME}")
    assert done.returncode == 4, done.stdout
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: cannot reach http://127.0.0.1:1: ")
    assert "VERL_P40_MODELS/OWNER/NAME" in done.stdout
    assert not cli.runs.exists()
