"""kill -9 anyone at any time; the same command goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from conftest import START, Cli, processes_of, trainer_pid, wait_for

from verl_p40.train import checkpoints
from verl_p40.train.folder import RunFolder
from verl_p40.train.metrics import History


def _only_run(cli: Cli) -> RunFolder | None:
    found = [p for p in cli.runs.glob("*") if (p / "env.json").exists()]
    assert len(found) <= 1, f"the same command made another folder: {found}"
    return RunFolder(found[0]) if found else None


def _trained_past(cli: Cli, saved: int) -> RunFolder | None:
    """The run once a checkpoint of step ``saved`` or later, and one more step, are there."""
    run = _only_run(cli)
    if run is None:
        return None
    step = checkpoints.tracked(run.checkpoints) or 0
    ahead = History.read(run.metrics).last_step > step
    return run if step >= saved and ahead else None


def _learned(record: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """A step's metrics but those that a clock or the machine's memory decides."""
    clock = ("timing_s/", "timing_per_token_ms/", "perf/")
    return record["step"], {k: v for k, v in record["data"].items() if not k.startswith(clock)}


def _events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == kind]


def _all_gone(folder: Path) -> bool:
    return not processes_of(folder)


def test_killed_trainer_and_killed_supervisor_are_resumed(cli: Cli) -> None:
    words = (str(cli.preset), "trainer.total_training_steps=24", "trainer.total_epochs=50")

    # A first attempt, whose trainer dies without a word.
    first = cli.start(*words)
    run = wait_for(lambda: _trained_past(cli, 2), START, "a checkpoint", first)
    rival = cli.run(*words)
    assert rival.returncode == 8, rival.stdout
    assert f"in use by process {first.pid}" in rival.stdout
    os.kill(trainer_pid(first.pid), signal.SIGKILL)
    wait_for(lambda: _events(run, "retry"), 60, "the supervisor to notice", first)
    saved = checkpoints.newest(run.checkpoints, critic=True)
    assert saved is not None

    # It goes on by itself; the supervisor dies this time, and takes everything with it.
    wait_for(lambda: _trained_past(cli, saved + 2), START, "a later checkpoint", first)
    os.kill(first.pid, signal.SIGKILL)
    said, _ = first.communicate(timeout=60)
    assert "killed by SIGKILL" in said
    assert "trying again in 5 s" in said
    assert f"resuming {run.path} from step {saved} of 24" in said
    wait_for(lambda: _all_gone(cli.home), 30, "Ray to be gone")
    again = checkpoints.newest(run.checkpoints, critic=True)
    assert again is not None
    assert again > saved

    # A half-written metrics line and checkpoint, as a kill can leave them.
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 99, "da')
    torn = run.checkpoints / f"global_step_{again + 2}" / "actor"
    torn.mkdir(parents=True, exist_ok=True)
    (torn / "model_world_size_1_rank_0.pt").write_bytes(b"PK\x03\x04 cut off")

    third = cli.run(*words)
    assert third.returncode == 0, third.stdout
    assert f"resuming {run.path} from step {again} of 24" in third.stdout
    assert _all_gone(cli.home)

    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert run.read_events()[0]["event"] == "start"
    assert len(_events(run, "resume")) == 2
    assert run.read_events()[-1]["event"] == "end"
    assert checkpoints.tracked(run.checkpoints) == 24

    # As if nothing had happened: the same rollouts and metrics as a run that went through.
    whole = cli.run(*words, "--run", "whole")
    assert whole.returncode == 0, whole.stdout
    reference = (cli.runs / "whole" / "metrics.jsonl").read_text().splitlines()
    assert [_learned(json.loads(line)) for line in reference] == [_learned(x) for x in lines]
    assert len({line["data"]["training/epoch"] for line in lines}) == 3

    exported = cli.call("export", run.name, str(cli.home / "model"), "--json")
    assert exported.returncode == 0, exported.stdout
    document = json.loads(exported.stdout)
    assert (document["step"], document["dtype"]) == (24, "float32")
    assert document["tokens"] > 0
    assert (cli.home / "model" / "model.safetensors").is_file()

    fourth = cli.run(*words)
    assert fourth.returncode == 0, fourth.stdout
    assert "already finished" in fourth.stdout
