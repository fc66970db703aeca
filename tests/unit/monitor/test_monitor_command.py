"""``verl-p40 monitor`` as a process, beside a run that is one."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from runkit import Start, end

from verl_p40.monitor import freshness, tables

COMMAND = (sys.executable, "-m", "verl_p40.cli.main", "monitor")
Monitor = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str, out: int | IO[str] = subprocess.PIPE, **how: object) -> object:
        child = subprocess.Popen(
            [*COMMAND, "--runs-dir", str(tmp_path / "runs"), *arguments],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            **how,  # type: ignore[call-overload]
        )
        running.append(child)
        return child

    (tmp_path / "runs").mkdir()
    yield start  # type: ignore[misc]
    for child in running:
        child.kill()
        child.communicate()


def _until(true: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _stop(child: subprocess.Popen[str], number: int) -> tuple[str, str, float]:
    began = time.monotonic()
    child.send_signal(number)
    out, err = child.communicate(timeout=10)
    return out, err, time.monotonic() - began


def test_it_waits_follows_moves_on_and_ends(
    tmp_path: Path, monitor: Monitor, start_run: Start
) -> None:
    runs = tmp_path / "runs"
    child = monitor("--interval", "0.2", "--every", "0.4")
    _until(lambda: freshness(runs) is not None)
    one = start_run(runs / "one", 2)
    _until(lambda: len(_rows(runs / "one" / "host.csv")) >= 5)
    end(one)
    start_run(runs / "two", 1)
    _until(lambda: len(_rows(runs / "two" / "host.csv")) >= 5)
    out, err, seconds = _stop(child, signal.SIGTERM)
    assert (child.returncode, err) == (0, "")
    assert seconds < 1.5
    said = [line[9:] for line in out.splitlines()]
    notes = [line for line in said if " | " not in line]
    assert notes[0].startswith("no GPU to sample (")
    assert notes[1] == f"no run in {runs} is active: waiting"
    assert notes[2] == f"following {runs / 'one'}"
    assert re.fullmatch(r"one interrupted at step \d+", notes[3])
    assert notes[-1] == f"following {runs / 'two'}"
    assert any(re.match(r"one  step \d+/60  reward 0.250 .*\| 3 processes", line) for line in said)
    rows = _rows(runs / "two" / "host.csv")
    assert list(rows[0]) == list(tables.HOST_COLUMNS)
    assert {row["process_count"] for row in rows} == {"2"}
    assert all(float(row["process_rss_bytes"]) > 1e7 for row in rows)
    assert rows[0]["process_pss_bytes"]
    assert all(row["cpu_percent"] for row in rows)
    assert not (runs / "two" / "gpu.csv").exists()
    # The first run's table has not grown after its end.
    last = _rows(runs / "one" / "host.csv")[-1]["time"]
    assert last < rows[0]["time"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_being_stopped_is_no_error(tmp_path: Path, monitor: Monitor, number: int) -> None:
    child = monitor("--interval", "3600")
    _until(lambda: freshness(tmp_path / "runs") is not None)
    _, _, seconds = _stop(child, number)
    assert child.returncode == 0
    assert seconds < 1.5


def test_json_is_a_line_a_sample(tmp_path: Path, monitor: Monitor, start_run: Start) -> None:
    run = tmp_path / "runs" / "one"
    start_run(run, 1)
    child = monitor("--json", "--interval", "0.2", "--no-write")
    assert child.stdout is not None
    samples = [json.loads(child.stdout.readline()) for _ in range(3)]
    assert samples[2]["run"]["name"] == "one"
    assert samples[2]["host"]["process_count"] == 2
    assert samples[2]["gpus"] == []
    # Whoever reads may go away.
    child.stdout.close()
    assert child.wait(timeout=10) == 0
    assert not (run / "host.csv").exists()
    assert freshness(tmp_path / "runs") is None


def test_once_is_one_sample_and_writes_nothing(
    tmp_path: Path, monitor: Monitor, start_run: Start
) -> None:
    run = tmp_path / "runs" / "one"
    start_run(run, 1)
    out, _ = monitor("one", "--once", "--json").communicate(timeout=30)
    document = json.loads(out)
    assert document["run"]["step"] >= 1
    assert document["host"]["cpu_percent"] is not None
    assert document["host"]["process_cpu_percent"] is not None
    out, _ = monitor("--once").communicate(timeout=30)
    assert "2 processes" in out
    assert not (run / "host.csv").exists()


def test_a_run_that_is_not_there_is_named_with_its_neighbours(
    tmp_path: Path, monitor: Monitor
) -> None:
    (tmp_path / "runs" / "cpu-demo-1a2b3c").mkdir()
    child = monitor("cpu-demo")
    _, err = child.communicate(timeout=30)
    assert child.returncode == 2
    assert f"there is no run folder {tmp_path / 'runs' / 'cpu-demo'}" in err
    assert "did you mean cpu-demo-1a2b3c?" in err


@pytest.mark.parametrize("where", ["runs folder", "run folder"])
def test_another_users_folder_is_one_line_and_exit_3(
    tmp_path: Path, start_run: Start, where: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")
    runs = tmp_path / "runs"
    runs.mkdir()
    refused = runs
    for folder in (runs, *runs.parents):
        # pytest keeps its folders to their owner.
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    if where == "run folder":
        runs.chmod(0o777)
        refused = runs / "one"
        start_run(refused, 0)
    # It changes its user when all is imported: the interpreter may be in root's home.
    program = (
        "import os, sys; from verl_p40.cli.main import run; import verl_p40.monitor.view, pynvml; "
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); run(sys.argv[1:])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, "monitor", "--runs-dir", str(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    _, err = child.communicate(timeout=30)
    assert child.returncode == 3, err
    assert f"error: cannot write {refused}: it belongs to uid 0 (mode 755)" in err
    assert "the monitor runs as uid 65534" in err
    assert "run the monitor as uid 0" in err
    assert len(err.splitlines()) == 2


def test_on_a_terminal_it_is_a_table_that_is_redrawn(
    tmp_path: Path, monitor: Monitor, start_run: Start
) -> None:
    start_run(tmp_path / "runs" / "one", 1)
    leader, follower = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    child = monitor("--interval", "0.2", out=follower, env=environ)
    os.close(follower)
    seen = b""
    deadline = time.monotonic() + 20
    while seen.count(b"2 processes") < 3 and time.monotonic() < deadline:
        if select.select([leader], [], [], 0.2)[0]:
            seen += os.read(leader, 65536)
    child.send_signal(signal.SIGINT)
    while select.select([leader], [], [], 0.5)[0]:
        try:
            seen += os.read(leader, 65536)
        except OSError:
            break
    assert child.wait(timeout=10) == 0
    os.close(leader)
    text = seen.decode()
    assert text.count("2 processes") >= 3
    assert "following" in text
    # The cursor is given back.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_command_is_documented() -> None:
    done = subprocess.run(
        [*COMMAND, "--help"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}
    )
    document = (Path(__file__).resolve().parents[3] / "docs" / "monitor.md").read_text()
    for option in set(re.findall(r"--[a-z-]+", done.stdout)) - {"--help"}:
        assert option in document, option


@pytest.mark.parametrize("columns", [tables.GPU_COLUMNS, tables.HOST_COLUMNS])
def test_the_documented_columns_are_those_that_are_written(columns: dict[str, str]) -> None:
    document = (Path(__file__).resolve().parents[3] / "docs" / "monitor.md").read_text()
    rows = [f"| `{name}` | {what} |" for name, what in columns.items()]
    assert "\n".join(rows) in document
