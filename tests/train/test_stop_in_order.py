"""SIGTERM in the middle of a step: the step is saved, and the same command goes on after it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from conftest import START, Cli, processes_of, wait_for

from verl_p40.train import checkpoints
from verl_p40.train.folder import RunFolder
from verl_p40.train.metrics import History

GRACE = 60.0


def _run(cli: Cli) -> RunFolder | None:
    found = [p for p in cli.runs.glob("*") if (p / "env.json").exists()]
    return RunFolder(found[0]) if found else None


def _past(cli: Cli, step: int) -> RunFolder | None:
    run = _run(cli)
    return run if run is not None and History.read(run.metrics).last_step >= step else None


def _steps(run: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def test_a_stop_saves_the_step_and_the_same_command_goes_on(cli: Cli) -> None:
    # No checkpoint and no validation of its own accord before the end.
    words = (
        str(cli.preset),
        "trainer.total_training_steps=16",
        "trainer.total_epochs=50",
        "trainer.save_freq=1000",
        "trainer.test_freq=-1",
    )
    first = cli.start(*words)
    run = wait_for(lambda: _past(cli, 2), START, "two steps", first)
    began = time.monotonic()
    os.kill(first.pid, signal.SIGTERM)
    said, _ = first.communicate(timeout=GRACE + 60)
    assert first.returncode == 130, said
    assert time.monotonic() - began < GRACE
    assert "SIGTERM: stopping after this step, saving a checkpoint" in said
    stopped = History.read(run.metrics).last_step
    assert stopped >= 3
    assert f"step {stopped} of 16" in said
    assert f"; checkpoint at step {stopped}" in said
    assert checkpoints.newest(run.checkpoints, critic=True) == stopped
    assert checkpoints.tracked(run.checkpoints) == stopped
    assert not processes_of(cli.home)
    event = run.read_events()[-1]
    assert (event["event"], event["step"], event["checkpoint"]) == ("stopped", stopped, stopped)
    assert _steps(run) == list(range(1, stopped + 1))

    # Goes on, and is stopped at once this time: the second signal does not wait for the step.
    second = cli.start(*words)
    wait_for(lambda: _past(cli, stopped + 1), START, "a later step", second)
    os.kill(_trainer_of(run, second.pid), signal.SIGSTOP)
    os.kill(second.pid, signal.SIGINT)
    time.sleep(2)
    assert second.poll() is None
    os.kill(second.pid, signal.SIGINT)
    said, _ = second.communicate(timeout=90)
    assert second.returncode == 130, said
    assert f"resuming {run.path} from step {stopped} of 16" in said
    assert "SIGINT: stopping after this step" in said
    assert f"; checkpoint at step {stopped}" in said
    assert not processes_of(cli.home)

    # Nothing is left of the two requests.
    third = cli.run(*words)
    assert third.returncode == 0, third.stdout
    assert f"resuming {run.path} from step {stopped} of 16" in third.stdout
    assert _steps(run) == list(range(1, 17))
    assert [e["event"] for e in run.read_events() if e["event"] in ("stopped", "end")] == [
        "stopped",
        "stopped",
        "end",
    ]


def _trainer_of(run: RunFolder, supervisor: int) -> int:
    """verl's own process: stopped, it does not get to its next step."""
    import psutil

    for child in psutil.Process(supervisor).children(recursive=True):
        if "TaskRunner" in " ".join(child.cmdline()):
            return child.pid
    raise AssertionError(f"no TaskRunner in {run.path}")


def test_a_stop_while_loading_leaves_nothing_to_wait_for(cli: Cli, tmp_path: Path) -> None:
    process = cli.start(str(cli.preset))
    run = wait_for(lambda: _run(cli), START, "the start", process)
    wait_for(lambda: b"Started a local Ray" in run.log.read_bytes(), START, "Ray", process)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 130, said
    assert time.monotonic() - began < GRACE
    assert "saving a checkpoint" not in said
    assert "; no checkpoint" in said
    assert run.read_events()[-1]["event"] == "stopped"
    assert not processes_of(cli.home)
