"""The checks over real heartbeat files, as the writers write them, at ages of the tests' choice."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from verl_p40.cli import main as cli
from verl_p40.health import LimitError, monitor, train
from verl_p40.health import __main__ as module
from verl_p40.train.folder import RunFolder
from verl_p40.train.heartbeat import Heartbeat, preparing
from verl_p40.train.view import View


class Silent:
    patience = 0.0

    def note(self, text: str) -> None: ...
    def phase(self, text: str) -> None: ...
    def step(self, *_: Any, **__: Any) -> None: ...
    def tick(self, *, rss: int) -> None: ...
    def close(self) -> None: ...


SILENT: View = Silent()


@pytest.fixture(autouse=True)
def own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VERL_P40_HEALTH_")]:
        monkeypatch.delenv(name)


def begin(runs: Path, name: str = "demo", **what: Any) -> RunFolder:
    run = RunFolder(runs / name)
    run.path.mkdir(parents=True, exist_ok=True)
    beat = {"state": "training", "phase": "training", "step": 12, "total": 60}
    Heartbeat(run.heartbeat, run=name, from_step=0).beat(now=True, **{**beat, **what})
    return run


def age(path: Path, **seconds: float) -> None:
    """Make times of a heartbeat older."""
    beat = json.loads(path.read_text())
    for key, by in seconds.items():
        then = datetime.fromisoformat(beat[key]) - timedelta(seconds=by)
        beat[key] = then.isoformat()
    path.write_text(json.dumps(beat))


def change(path: Path, **what: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **what}))


def test_nothing_was_started(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "no"):
        found = train(str(folder))
        assert not found.ok
        assert found.line() == f"unhealthy: no training has been started in {folder}"


def test_a_run_that_steps(tmp_path: Path) -> None:
    run = begin(tmp_path, median_step_seconds=2.0, slowest_step_seconds=9.0)
    age(run.heartbeat, progress=250)
    found = train(str(tmp_path))
    assert found.ok
    assert found.why == "demo: training, step 12 of 60; got on 4:10 ago (limit 5:00)"
    age(run.heartbeat, progress=100)
    found = train(str(tmp_path))
    assert not found.ok
    assert found.why == "demo: training, step 12 of 60; has not got on for 5:50 (limit 5:00)"


@pytest.mark.parametrize(
    ("median", "slowest", "allowed"), [(1, 2, 300), (60, 61, 600), (20, 400, 1200)]
)
def test_the_limit_follows_the_steps(
    tmp_path: Path, median: float, slowest: float, allowed: float
) -> None:
    """Ten times the median, three times the longest (with validation and saving), at least 300 s."""
    run = begin(tmp_path, median_step_seconds=median, slowest_step_seconds=slowest)
    age(run.heartbeat, progress=allowed - 5)
    assert train(str(tmp_path)).ok
    age(run.heartbeat, progress=10)
    assert not train(str(tmp_path)).ok


def test_the_limits_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(tmp_path, median_step_seconds=0.5, slowest_step_seconds=0.5)
    age(run.heartbeat, progress=20)
    assert train(str(tmp_path)).ok
    monkeypatch.setenv("VERL_P40_HEALTH_STEP", "10")
    assert not train(str(tmp_path)).ok
    for wrong in ("soon", "0", "-3", "inf", "nan"):
        monkeypatch.setenv("VERL_P40_HEALTH_STEP", wrong)
        with pytest.raises(LimitError, match=f"VERL_P40_HEALTH_STEP is '{wrong}'"):
            train(str(tmp_path))


def test_before_the_first_step_there_is_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path, phase="loading the models", step=0)
    age(run.heartbeat, progress=1700)
    assert train(str(tmp_path)).ok
    age(run.heartbeat, progress=200)
    assert not train(str(tmp_path)).ok
    monkeypatch.setenv("VERL_P40_HEALTH_START", "3600")
    assert train(str(tmp_path)).ok


def test_a_supervisor_that_is_gone(tmp_path: Path) -> None:
    run = begin(tmp_path, median_step_seconds=1.0)
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    change(run.heartbeat, pid=done.pid)
    found = train(str(tmp_path))
    assert not found.ok
    assert f"its supervisor, process {done.pid}, is gone" in found.why
    # In another container the number would mean nothing: only the silence does.
    change(run.heartbeat, pid_namespace="pid:[1]")
    assert train(str(tmp_path)).ok
    age(run.heartbeat, time=70)
    assert "is gone: nothing heard of it for 1:10" in train(str(tmp_path)).why


def test_a_supervisor_that_is_stopped(tmp_path: Path) -> None:
    run = begin(tmp_path, median_step_seconds=1.0)
    age(run.heartbeat, time=61)
    with run.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = train(str(tmp_path))
    assert not found.ok
    assert "is stopped or hangs: nothing heard of it for 1:01 at step 12 of 60" in found.why


@pytest.mark.parametrize("state", ["finished", "failed", "tripped", "interrupted"])
def test_only_a_finished_run_is_well(tmp_path: Path, state: str) -> None:
    run = begin(tmp_path, state=state)
    age(run.heartbeat, time=1e6, progress=1e6)
    found = train(str(tmp_path))
    assert found.ok == (state == "finished")
    assert state in found.why and "step 12 of 60" in found.why


def test_preparation_is_seen_and_leaves_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "demo")
    with preparing(run, SILENT) as view:
        view.phase("downloading the training stack: 1 GB of 6 GB")
        found = train(str(tmp_path))
        assert found.ok
        assert "demo: downloading the training stack: 1 GB of 6 GB; got on" in found.why
        (file,) = tmp_path.iterdir()
        age(file, progress=1900)
        found = train(str(tmp_path))
        assert not found.ok
        assert "has not got on for 31:4" in found.why
        view.phase("checking model and data")
        assert train(str(tmp_path)).ok
    assert list(tmp_path.iterdir()) == []


def test_preparation_that_was_killed(tmp_path: Path) -> None:
    file = tmp_path / ".demo.preparing.json"
    Heartbeat(file, run="demo").beat(state="preparing", phase="preparing the demo data", now=True)
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    change(file, pid=done.pid)
    found = train(str(tmp_path))
    assert not found.ok
    assert f"its process, {done.pid}, is gone" in found.why


def test_preparation_makes_no_folder(tmp_path: Path) -> None:
    with preparing(RunFolder(tmp_path / "runs" / "demo"), SILENT) as view:
        view.phase("composing")
    assert list(tmp_path.iterdir()) == []


def test_of_several_runs_the_last_of_this_host_counts(tmp_path: Path) -> None:
    old, other = begin(tmp_path, "old", state="failed"), begin(tmp_path, "other", state="failed")
    begin(tmp_path, "mine", median_step_seconds=1.0)
    age(old.heartbeat, time=50)
    change(other.heartbeat, host="another", time=datetime.now(timezone.utc).isoformat())
    assert train(str(tmp_path)).why.startswith("mine: ")
    change(tmp_path / "mine" / "heartbeat.json", host="a-third", pid_namespace="another")
    change(old.heartbeat, host="a-third")
    # None of this host: the last of any.
    assert train(str(tmp_path)).why.startswith("other was failed")


def test_a_clock_that_is_set_back_hides_no_run_that_works(tmp_path: Path) -> None:
    ended, works = begin(tmp_path, "ended"), begin(tmp_path, "works")
    change(ended.heartbeat, state="finished")
    age(ended.heartbeat, time=-3600, progress=-3600)
    assert train(str(tmp_path)).why.startswith("works: ")
    age(works.heartbeat, time=-1800, progress=-7200)
    found = train(str(tmp_path))
    assert found.ok, "a heartbeat from the future is none that is late"
    # Once the process is gone, what ended after it counts again.
    change(works.heartbeat, pid=2**22 + 1, time=datetime.now(timezone.utc).isoformat())
    assert train(str(tmp_path)).why.startswith("ended is finished")


def test_a_clock_that_jumps_ahead_makes_nothing_look_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path)
    heartbeat = Heartbeat(run.heartbeat, run="demo")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    heartbeat.beat(now=True, state="training", phase="x", step=1, total=2)
    beat = json.loads(run.heartbeat.read_text())
    late = datetime.fromisoformat(beat["time"]) - datetime.fromisoformat(beat["progress"])
    assert late.total_seconds() < 60


def test_what_is_no_heartbeat_is_passed_over(tmp_path: Path) -> None:
    begin(tmp_path, median_step_seconds=1.0)
    for name, text in (
        ("torn", '{"time": "20'),
        ("list", "[]"),
        ("none", "{}"),
        ("x", '{"time": 3}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "heartbeat.json").write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").write_text("")
    assert train(str(tmp_path)).ok


def _sampled(runs: Path, seconds: float, **what: Any) -> None:
    then = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    document = {"time": then.isoformat(), "run": "demo", "samples": 7, "errors": 0, **what}
    (runs / ".monitor.json").write_text(json.dumps(document))


def test_the_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert monitor(str(tmp_path)).why == f"no monitor has taken a sample in {tmp_path}"
    _sampled(tmp_path, 3)
    assert monitor(str(tmp_path)).line() == "healthy: sampled 3 s ago; following demo"
    _sampled(tmp_path, 3, run=None)
    assert monitor(str(tmp_path)).line() == "healthy: sampled 3 s ago; no run to follow"
    _sampled(tmp_path, 20)
    found = monitor(str(tmp_path))
    assert not found.ok
    assert found.why == "the last good sample is 20 s old (limit 15 s); following demo"
    _sampled(tmp_path, 20, interval=5)
    assert monitor(str(tmp_path)).ok
    _sampled(tmp_path, 20)
    monkeypatch.setenv("VERL_P40_HEALTH_MONITOR", "30")
    assert monitor(str(tmp_path)).ok


def test_the_module_says_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path, median_step_seconds=1.0)
    assert module.main(["train", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("healthy: demo: training, step 12 of 60")
    age(run.heartbeat, progress=400)
    assert module.main(["train", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("unhealthy: ")
    for wrong in ([], ["trian"], ["train", "a", "b"]):
        assert module.main(wrong) == 2
    assert "usage: " in capsys.readouterr().err


def test_the_module_is_light(tmp_path: Path) -> None:
    """Started every half minute beside a training on two cores: no third-party module."""
    begin(tmp_path, median_step_seconds=1.0)
    code = (
        "import sys; before = set(sys.modules)\n"
        "from verl_p40.health.__main__ import main\n"
        f"assert main(['train', {str(tmp_path)!r}]) == 0\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['verl_p40']"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path, median_step_seconds=1.0)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            cli.run(["health", *words])
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    code, out, _ = call("train", "--runs-dir", str(tmp_path))
    assert (code, out.startswith("healthy: demo: training")) == (0, True)
    age(run.heartbeat, progress=400)
    code, out, _ = call("train", "--runs-dir", str(tmp_path), "--json")
    document = json.loads(out)
    assert (code, document["healthy"], document["limit"]) == (1, False, 300.0)
    assert document["since"] >= 400
    assert call("smoke")[0] == 2
