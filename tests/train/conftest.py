"""Real runs of the real verl, through the command, inside the training stack.

``python -m pytest tests/train`` with the stack's own Python. Two cores and a minute a start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

# The stack's interpreter has verl; our package comes from this checkout.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]

import tiny  # noqa: E402

from verl_p40.stack import paths  # noqa: E402

START = 600.0
"""Seconds until a run must have trained a step, on a machine that is busy with other things."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.train)
            item.add_marker(pytest.mark.stack)


@dataclass
class Cli:
    """``verl-p40 train`` in a folder of its own."""

    home: Path
    preset: Path

    @property
    def runs(self) -> Path:
        return self.home / "runs"

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "verl_p40.cli.main", "train", *words]

    def env(self) -> dict[str, str]:
        source = str(paths.package_dir().parent)
        old = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [source, old])),
            "VERL_P40_RUNS": str(self.runs),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*words),
            cwd=self.home,
            env=self.env(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another command than ``train``; its errors stay on our standard error."""
        return subprocess.run(
            [sys.executable, "-m", "verl_p40.cli.main", *words],
            cwd=self.home,
            env=self.env(),
            text=True,
            stdout=subprocess.PIPE,
            timeout=START,
        )

    def run(self, *words: str, timeout: float = START) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words),
            cwd=self.home,
            env=self.env(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    tiny.make(folder)
    return folder


@pytest.fixture
def cli(tmp_path: Path, assets: Path) -> Iterator[Cli]:
    preset = tmp_path / "tiny.yaml"
    preset.write_text(tiny.PRESET.format(assets=assets))
    yield Cli(tmp_path, preset)
    for process in processes_of(tmp_path):
        process.kill()


def trainer_pid(supervisor: int) -> int:
    """The driver of verl that a supervisor follows."""
    for child in psutil.Process(supervisor).children(recursive=True):
        line = " ".join(child.cmdline())
        if "-m verl.trainer.main_ppo" in line and "verl_p40.train.guard" not in line:
            return child.pid
    raise AssertionError("the supervisor has no trainer")


def processes_of(folder: Path) -> list[psutil.Process]:
    """Living processes whose command line or Ray session belongs to a run below ``folder``."""
    marks = [str(folder)]
    for env in folder.glob("runs/*/env.json"):
        marks.append(json.loads(env.read_text())["ray_tmp"])
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                line = " ".join(process.cmdline())
                if any(mark in line for mark in marks) and "pytest" not in line:
                    found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(
    check: Callable[[], Any],
    seconds: float,
    what: str,
    process: subprocess.Popen[str] | None = None,
) -> Any:
    """Wait until ``check`` gives something; an end of ``process`` before that is a failure."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = check()
        if value:
            return value
        if process is not None and process.poll() is not None:
            assert process.stdout is not None
            raise AssertionError(f"waited for {what}, and it ended: {process.stdout.read()}")
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")
