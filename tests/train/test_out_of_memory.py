"""Out of memory in a real worker: the run steps down its ladder, resumes, and comes to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Cli

from verl_p40.train.folder import RunFolder


def test_the_actor_runs_out_of_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli.home / "struck"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("OOM_AT", "actor._forward_micro_batch:18")
    monkeypatch.setenv("OOM_DONE", str(done))
    ran = cli.run(
        str(cli.preset),
        "actor_rollout_ref.model.external_lib=oomlib",
        "trainer.total_training_steps=6",
        "trainer.test_freq=-1",
    )
    assert ran.returncode == 0, ran.stdout
    assert done.exists(), "nothing ran out of memory"
    assert "OutOfMemoryError" in ran.stdout
    assert "cause (" in ran.stdout
    assert "going on with less memory: " in ran.stdout
    (folder,) = cli.runs.iterdir()
    run = RunFolder(folder)
    (retry,) = [event for event in run.read_events() if event["event"] == "retry"]
    assert retry["cause"].startswith("cuda-oom")
    settings = retry["ladder"]["overrides"]
    # The 18th forward pass is the reference's, and Ray's words say so: what lowers that is chosen.
    reference = ("actor_rollout_ref.ref.", "actor_rollout_ref.model.override_config.attn")
    assert settings[0].startswith(reference)
    resumed = [event for event in run.read_events() if event["event"] == "resume"]
    assert [event["settings"] for event in resumed] == [settings]
    assert f"resuming {folder} from step {resumed[0]['step']} of 6" in ran.stdout
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
