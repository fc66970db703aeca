"""A disk that fills up and a log that is rotated while a real run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import START, Cli, trainer_pid, wait_for

from verl_p40.train import checkpoints
from verl_p40.train.folder import RunFolder
from verl_p40.train.metrics import History


def _past(cli: Cli, step: int) -> RunFolder | None:
    found = [p for p in cli.runs.glob("*") if (p / "env.json").exists()]
    run = RunFolder(found[0]) if found else None
    return run if run is not None and History.read(run.metrics).last_step >= step else None


def _steps(run: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


@pytest.fixture
def small_disk(cli: Cli) -> Iterator[Path]:
    """The folder of the runs on a disk of its own."""
    cli.runs.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(cli.runs)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield cli.runs
    subprocess.run(["umount", "--lazy", str(cli.runs)], check=True)


def test_a_disk_that_fills_keeps_the_last_checkpoint(cli: Cli, small_disk: Path) -> None:
    words = (str(cli.preset), "trainer.total_training_steps=12", "trainer.test_freq=-1")
    first = cli.start(*words)
    run = wait_for(lambda: _past(cli, 3), START, "three steps", first)
    with (small_disk / "other").open("wb") as other, pytest.raises(OSError, match="No space"):
        while True:
            other.write(bytes(2**20))
            other.flush()
    said, _ = first.communicate(timeout=START)
    assert first.returncode not in (0, None), said
    # verl's own words differ with the call that found no space, and the log may have had no room
    # for them; the cause has to be named.
    assert "the disk is full" in said or "No space left on device" in said, said
    told = cli.call("diagnose", str(run.path), "--json")
    assert "disk-full" in {cause["kind"] for cause in json.loads(told.stdout)["causes"]}, (
        told.stdout
    )
    saved = checkpoints.newest(run.checkpoints, critic=True)
    assert saved is not None, "the last whole checkpoint is gone"
    assert not list(run.checkpoints.glob("*.partial"))
    assert (small_disk / "other").exists()

    # Nothing is lost by trying again while it is still full.
    again = cli.run(*words)
    assert again.returncode != 0
    assert checkpoints.newest(run.checkpoints, critic=True) == saved

    (small_disk / "other").unlink()
    third = cli.run(*words)
    assert third.returncode == 0, third.stdout
    assert f"resuming {run.path} from step {saved} of 12" in third.stdout
    assert _steps(run) == list(range(1, 13))


def test_a_log_that_is_rotated_is_followed_on(cli: Cli) -> None:
    words = (
        str(cli.preset),
        "trainer.total_training_steps=60",
        "trainer.total_epochs=50",
        "trainer.test_freq=-1",
    )
    first = cli.start(*words, "--retries", "0")
    run = wait_for(lambda: _past(cli, 2), START, "two steps", first)
    # logrotate's two ways: moved away with a new file in its place, and copied and cut.
    run.log.rename(run.log.with_name("train.log.1"))
    run.log.touch()
    wait_for(lambda: _past(cli, 4), START, "more steps", first)
    moved = run.log.with_name("train.log.1")
    shutil.copy(moved, moved.with_name("train.log.2"))
    os.truncate(moved, 0)
    run = wait_for(lambda: _past(cli, 6), START, "still more", first)
    os.kill(trainer_pid(first.pid), signal.SIGKILL)
    said, _ = first.communicate(timeout=120)
    assert first.returncode not in (0, None)
    assert "killed by SIGKILL" in said, said
    assert "step 6" in said
