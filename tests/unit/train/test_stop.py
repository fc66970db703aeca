"""How a run ends that is asked to: a supervisor in a process of its own, and a real child to stop.

The child does what verl does as far as a stop goes: it draws a bar as its loop begins, looks for
the file once a step, saves, logs, and returns.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_p40.errors import UsageError
from verl_p40.health import train as health
from verl_p40.train import process, stopping
from verl_p40.train.folder import RunFolder
from verl_p40.train.stopping import OrderlyStop

SUPERVISOR = """
import json, os, sys
from pathlib import Path
from rich.console import Console
from verl_p40.train import process
from verl_p40.train.folder import RunFolder
from verl_p40.train.ending import note_end
from verl_p40.train.stopping import OrderlyStop, file_in
from verl_p40.train.supervise import Attempt, supervise
from verl_p40.train.view import PlainView

where, trainer, grace, saves = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
run = RunFolder(where / "run")
with process.interruptible() as interrupt, run.hold() as lock:
    (where / "ready").touch()
    outcome = supervise(
        Attempt(run=run, command=(sys.executable, "-c", trainer), cwd=where, lock=lock, total=9,
                environ={**os.environ, "VERL_STOP_FILE": str(file_in(where)), "WHERE": str(run.path)},
                from_step=0, tripwire=False,
                stop=OrderlyStop(file_in(where), grace, saves == "saves")),
        PlainView(Console(width=200)), interrupt)
    note_end(run, outcome)
result = [outcome.status, outcome.step, outcome.checkpoint, outcome.seconds, outcome.exit_text]
(where / "outcome").write_text(json.dumps(result))
"""

TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
where = Path(os.environ["WHERE"])
(where / "checkpoints").mkdir(exist_ok=True)
print("loading", flush=True)
{before}
print("Training Progress:   0%", flush=True)
for step in range(1, 10):
    (where / f"at-{{step}}").touch()
    time.sleep({pace})
    last = os.path.exists(os.environ["VERL_STOP_FILE"]) or step == 9
    if last:
        {saving}
        (where / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
    with (where / "metrics.jsonl").open("a") as log:
        data = {{"critic/score/mean": 0.5, "timing_s/step": {pace}}}
        log.write(json.dumps({{"step": step, "data": data}}) + "\\n")
    if last:
        break
"""


def trainer(before: str = "", pace: float = 0.6, saving: str = "pass") -> str:
    return TRAINER.format(before=before, pace=pace, saving=saving)


class Running:
    """A supervisor at work."""

    def __init__(
        self, where: Path, script: str, *, grace: float = 30, saves: bool = True, **how: Any
    ) -> None:
        self.where = where
        self.run = RunFolder(where / "run")
        words = [str(where), script, str(grace), "saves" if saves else "none"]
        streams = how or {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, *words], text=True, **streams
        )

    def wait(self, check: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def reach(self, step: int) -> None:
        self.wait((self.run.path / f"at-{step}").exists)

    def ask(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.process.pid, number)

    def asked(self) -> bool:
        return stopping.file_in(self.where).exists()

    def end(self) -> tuple[str, int, int | None, float, str]:
        self.said, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, self.said
        status, step, checkpoint, seconds, text = json.loads((self.where / "outcome").read_text())
        return status, step, checkpoint, seconds, text

    def last_event(self) -> dict[str, Any]:
        return self.run.read_events()[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    begun: list[Running] = []

    def begin(script: str, **how: Any) -> Running:
        begun.append(Running(tmp_path, script, **how))
        return begun[-1]

    yield begin
    for running in begun:
        running.process.kill()
        running.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_step_is_finished_and_saved(start: Callable[..., Running], number: int) -> None:
    running = start(trainer())
    running.reach(2)
    running.ask(number)
    status, step, checkpoint, _, text = running.end()
    assert (status, step, checkpoint, text) == ("interrupted", 2, 2, "exit code 0")
    name = signal.Signals(number).name
    assert (
        f"{name}: stopping after this step, saving a checkpoint, 30 s at most "
        "(Ctrl-C again to stop at once)" in running.said
    )
    event = running.last_event()
    assert (event["event"], event["status"]) == ("stopped", "interrupted")
    assert (event["step"], event["checkpoint"], event["signal"]) == (2, 2, name)
    beat = json.loads(running.run.heartbeat.read_text())
    assert (beat["state"], beat["step"]) == ("interrupted", 2)


def test_signals_at_one_time_are_one_request(start: Callable[..., Running]) -> None:
    """`timeout` signals its child, then its group; a closed terminal sends two SIGHUPs."""
    running = start(trainer())
    running.reach(2)
    running.ask()
    running.ask(signal.SIGINT)
    running.ask(signal.SIGHUP)
    time.sleep(0.1)
    running.ask(signal.SIGHUP)
    assert running.end()[:3] == ("interrupted", 2, 2)


def test_a_second_signal_stops_at_once(start: Callable[..., Running]) -> None:
    running = start(trainer(pace=20))
    running.reach(1)
    running.ask()
    running.wait(running.asked)
    time.sleep(process._ONE_STOP + 0.1)
    began = time.monotonic()
    running.ask(signal.SIGINT)
    status, step, checkpoint, _, text = running.end()
    assert (status, step, checkpoint, text) == ("interrupted", 0, None, "killed by SIGTERM")
    assert time.monotonic() - began < 10
    assert running.last_event()["checkpoint"] is None


def test_the_grace_ends(start: Callable[..., Running]) -> None:
    running = start(trainer(pace=20), grace=1.5)
    running.reach(1)
    began = time.monotonic()
    running.ask()
    assert running.end()[:3] == ("interrupted", 0, None)
    assert 1.5 <= time.monotonic() - began < 12


@pytest.mark.parametrize("how", ["loading", "no checkpoints", "no grace", "no file"])
def test_nothing_to_save_stops_at_once(
    start: Callable[..., Running], tmp_path: Path, how: str
) -> None:
    if how == "loading":
        running = start(trainer(before="time.sleep(20)"))
        running.wait(
            lambda: running.run.log.exists() and b"loading" in running.run.log.read_bytes()
        )
    else:
        if how == "no file":
            stopping.file_in(tmp_path).symlink_to(tmp_path / "no" / "such")
        running = start(
            trainer(pace=20), saves=how != "no checkpoints", grace=0 if how == "no grace" else 30
        )
        running.reach(1)
        time.sleep(0.5)
    began = time.monotonic()
    running.ask()
    status, step, checkpoint, _, text = running.end()
    assert (status, step, checkpoint, text) == ("interrupted", 0, None, "killed by SIGTERM")
    assert time.monotonic() - began < 10
    assert "saving a checkpoint" not in running.said


def test_a_trainer_that_fails_while_it_saves_has_failed(start: Callable[..., Running]) -> None:
    running = start(trainer(saving="raise OSError(28, 'No space left on device')"))
    running.reach(1)
    running.ask()
    assert running.end()[0] == "failed"
    assert running.last_event()["event"] == "failure"
    assert "No space left on device" in running.last_event()["error"]


def test_a_stop_in_the_last_step_is_a_finished_run(start: Callable[..., Running]) -> None:
    running = start(trainer(pace=0.15))
    running.reach(9)
    running.ask()
    assert running.end()[:3] == ("finished", 9, 9)
    assert running.last_event()["event"] == "end"


def test_a_closed_terminal_does_not_cost_the_checkpoint(start: Callable[..., Running]) -> None:
    master, slave = pty.openpty()
    running = start(trainer(), stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    running.reach(2)
    os.close(master)
    running.ask(signal.SIGHUP)
    running.process.wait(timeout=60)
    status, step, checkpoint, *_ = json.loads((running.where / "outcome").read_text())
    assert (status, step, checkpoint) == ("interrupted", 2, 2)


def test_the_health_of_a_run(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, hanging, killed: what a container's health check says of each."""
    monkeypatch.setenv("VERL_P40_HEALTH_STEP", "1")
    running = start(trainer(before="time.sleep(3)", pace=0.2))
    runs = str(running.where)
    running.wait(running.run.heartbeat.exists)
    found = health(runs)
    assert found.ok and "run: starting Ray, step 0 of 9; got on" in found.why
    running.reach(3)
    (trainer_pid,) = (int(p.pid) for p in _children(running.process.pid) if "at-{" in _line(p))
    os.kill(trainer_pid, signal.SIGSTOP)
    running.wait(lambda: not health(runs).ok)
    assert re.search(
        r"training, step \d of 9; has not got on for \d+ s \(limit \d s\)", health(runs).why
    )
    os.kill(trainer_pid, signal.SIGCONT)
    running.wait(lambda: health(runs).ok)
    assert running.end()[:2] == ("finished", 9)
    assert health(runs).why == "run is finished, at step 9 of 9"


def test_a_killed_supervisor_is_unhealthy_at_once(start: Callable[..., Running]) -> None:
    running = start(trainer(pace=20))
    running.reach(1)
    running.wait(lambda: health(str(running.where)).ok)
    running.process.kill()
    running.process.wait()
    found = health(str(running.where))
    assert not found.ok
    assert f"its supervisor, process {running.process.pid}, is " in found.why


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _line(process: psutil.Process) -> str:
    """The command line; empty for the guard, which has the trainer's in its own."""
    line = process.cmdline()
    return "" if "verl_p40.train.guard" in line else " ".join(line)


def test_the_grace_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stopping.GRACE, raising=False)
    assert stopping.grace() == stopping.DEFAULT_GRACE
    monkeypatch.setenv(stopping.GRACE, " 2.5 ")
    assert stopping.grace() == 2.5
    monkeypatch.setenv(stopping.GRACE, "0")
    assert stopping.grace() == 0
    for wrong in ("2 min", "-1", "nan", "inf"):
        monkeypatch.setenv(stopping.GRACE, wrong)
        with pytest.raises(UsageError, match="VERL_P40_STOP_GRACE is '"):
            stopping.grace()


def test_another_attempt_finds_no_old_request(tmp_path: Path) -> None:
    """The file is in a folder of the attempt's own, under a name that nothing else has."""
    first, second = process.make_ray_tmp(), process.make_ray_tmp()
    try:
        assert OrderlyStop(stopping.file_in(first), 1, True)._ask()
        assert stopping.file_in(first).exists() and not stopping.file_in(second).exists()
    finally:
        process.remove_ray_tmp(first)
        process.remove_ray_tmp(second)
    assert not first.exists()


def test_signals_while_preparing_interrupt_what_is_done() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), process.raising():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before
