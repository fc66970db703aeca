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
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from runkit import Start, end

from verl_p40.cli.main import run as run_command
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
    _until(lambda: [row["process_count"] for row in _rows(runs / "two" / "host.csv")][5:])
    _until(lambda: _rows(runs / "two" / "host.csv")[-1]["process_count"] == "2")
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
    assert any(re.match(r"one  step \d+/60  reward 0.250 .*\| \d process", line) for line in said)
    rows = _rows(runs / "two" / "host.csv")
    assert list(rows[0]) == list(tables.HOST_COLUMNS)
    assert rows[-1]["process_count"] == "2"
    assert all(float(row["process_rss_bytes"]) > 1e7 for row in rows)
    assert rows[0]["process_pss_bytes"]
    assert all(row["cpu_percent"] for row in rows)
    assert not (runs / "two" / "gpu.csv").exists()
    # The first run's table has not grown after its end.
    last = _rows(runs / "one" / "host.csv")[-1]["time"]
    assert last < rows[0]["time"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
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


def _here(*arguments: str) -> int:
    """Run the command in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        run_command(["monitor", *arguments])
    return int(ended.value.code or 0)


def test_once_is_one_sample_and_writes_nothing(
    tmp_path: Path, start_run: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "one"
    start_run(run, 1)
    assert _here("one", "--runs-dir", str(run.parent), "--once", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["step"] >= 1
    assert document["host"]["cpu_percent"] is not None
    assert document["host"]["process_cpu_percent"] is not None
    assert _here(str(run), "--once") == 0
    assert "2 processes" in capsys.readouterr().out
    assert not (run / "host.csv").exists()


def test_a_run_that_is_not_there_is_named_with_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cpu-demo-1a2b3c").mkdir()
    assert _here("cpu-demo", "--runs-dir", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert f"there is no run folder {tmp_path / 'cpu-demo'}" in said
    assert "did you mean cpu-demo-1a2b3c?" in said


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest keeps its own to their owner."""
    with tempfile.TemporaryDirectory(prefix="vp40-monitor-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


# It changes its user when all is imported: the interpreter may be in root's home.
AS_NOBODY = (
    "import os, sys; from verl_p40.cli.main import run; import verl_p40.monitor.view, pynvml; "
    "os.setgroups([]); os.setgid(65534); os.setuid(65534); run(sys.argv[1:])"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
@pytest.mark.parametrize("where", ["runs folder", "run folder", "above"])
def test_another_users_folder_is_one_line_and_exit_3(
    open_folder: Path, start_run: Start, where: str
) -> None:
    runs = open_folder / "runs"
    runs.mkdir()
    expected = f"error: cannot write {runs}: it belongs to uid 0 (mode 755)"
    if where == "run folder":
        runs.chmod(0o777)
        start_run(runs / "one", 0)
        expected = f"error: cannot write {runs / 'one'}: it belongs to uid 0 (mode 755)"
    if where == "above":
        open_folder.chmod(0o700)
        expected = f"error: cannot read {runs}: the monitor runs as uid 65534, which may not even"
    child = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, "monitor", "--runs-dir", str(runs)],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=30,
    )
    assert child.returncode == 3, child.stderr
    assert expected in child.stderr
    assert "runs as uid 65534" in child.stderr
    assert "fix: run the monitor as" in child.stderr
    assert len(child.stderr.splitlines()) == 2


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


def test_the_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert _here("--help") == 0
    document = (Path(__file__).resolve().parents[3] / "docs" / "monitor.md").read_text()
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) == 6
    for option in options:
        assert option in document, option


@pytest.mark.parametrize("columns", [tables.GPU_COLUMNS, tables.HOST_COLUMNS])
def test_the_documented_columns_are_those_that_are_written(columns: dict[str, str]) -> None:
    document = (Path(__file__).resolve().parents[3] / "docs" / "monitor.md").read_text()
    rows = [f"| `{name}` | {what} |" for name, what in columns.items()]
    assert "\n".join(rows) in document
