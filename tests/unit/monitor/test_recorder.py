from __future__ import annotations

import csv
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from samples import P40, sample

from verl_p40.errors import ExitCode, MachineError
from verl_p40.monitor import csvlog, heartbeat, tables
from verl_p40.monitor.recorder import Recorder


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    return folder


def test_both_tables_and_the_heartbeat(run: Path) -> None:
    notes: list[str] = []
    recorder = Recorder(run.parent, notes.append)
    second = replace(P40, index=1, fan_percent=40.0, throttle=None, processes=None)
    recorder.record(sample(run, gpus=(P40, second)))
    assert notes == []
    first, other = _table(run / "gpu.csv")
    assert first == {
        "time": "2025-07-01T12:00:00.123Z",
        "index": "0",
        "name": "Tesla P40",
        "utilization_percent": "100",
        "memory_utilization_percent": "61",
        "memory_used_mib": "22747",
        "memory_total_mib": "22919",
        "power_w": "172",
        "power_limit_w": "250",
        "temperature_c": "82",
        "fan_percent": "",
        "sm_clock_mhz": "1303",
        "memory_clock_mhz": "3615",
        "pstate": "P0",
        "throttle_reasons": "none",
        "pcie_generation": "3",
        "pcie_width": "16",
        "process_count": "1",
        "process_memory_mib": "22737",
    }
    assert (other["fan_percent"], other["throttle_reasons"], other["process_count"]) == (
        "40",
        "",
        "",
    )
    (host,) = _table(run / "host.csv")
    assert host["time"] == first["time"]
    assert host["cpu_percent"] == "37.5"
    assert (host["process_count"], host["process_cpu_percent"]) == ("31", "174")
    assert int(host["process_pss_bytes"]) == 3 * 1024**3
    last = heartbeat.last(run.parent)
    assert last is not None
    assert (last["run"], last["samples"], last["errors"]) == ("demo", 1, 0)
    age = heartbeat.freshness(run.parent)
    assert age is not None
    assert 0 <= age < 5


def test_without_a_gpu_there_is_no_gpu_table(run: Path) -> None:
    Recorder(run.parent, print).record(sample(run, gpus=(), tree=None))
    assert not (run / "gpu.csv").exists()
    (host,) = _table(run / "host.csv")
    assert (host["ram_total_bytes"], host["process_count"]) == (str(24 * 1024**3), "")


def test_without_a_run_the_heartbeat_goes_on(run: Path) -> None:
    recorder = Recorder(run.parent, print)
    recorder.record(sample())
    assert list(run.iterdir()) == []
    last = heartbeat.last(run.parent)
    assert last is not None
    assert (last["run"], last["samples"]) == (None, 0)


def test_a_runs_folder_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    Recorder(tmp_path / "runs", print).record(sample())
    assert list(tmp_path.iterdir()) == []
    assert heartbeat.freshness(tmp_path / "runs") is None


def test_rows_go_where_the_run_is(run: Path) -> None:
    other = run.parent / "other"
    other.mkdir()
    recorder = Recorder(run.parent, print)
    for folder in (run, run, other, run):
        recorder.record(sample(folder))
    assert len(_table(run / "host.csv")) == 3
    assert len(_table(other / "host.csv")) == 1


def test_of_two_monitors_one_writes(run: Path) -> None:
    said: list[str] = []
    first, second = Recorder(run.parent, print), Recorder(run.parent, said.append)
    for _ in range(2):
        first.record(sample(run))
        second.record(sample(run))
    assert len(_table(run / "host.csv")) == 2
    assert said == [f"another monitor writes {run}: this one only shows"]
    first.close()
    second.record(sample(run))
    assert len(_table(run / "host.csv")) == 3


def test_a_full_disk_drops_samples_and_says_so_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full disk itself is in test_csvlog.py; here is what follows from it."""
    notes: list[str] = []
    recorder = Recorder(run.parent, notes.append)
    recorder.record(sample(run))
    beat = heartbeat.last(run.parent)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(csvlog.os, "write", full)
    for _ in range(3):
        recorder.record(sample(run))
    # A health check sees that nothing is written.
    assert heartbeat.last(run.parent) == beat
    monkeypatch.setattr(csvlog.os, "write", real)
    recorder.record(sample(run))
    assert notes == [
        f"{run} cannot be written (No space left on device): samples are dropped",
        "writing again: 3 samples were dropped",
    ]
    assert len(_table(run / "host.csv")) == 2
    last = heartbeat.last(run.parent)
    assert last is not None
    assert (last["samples"], last["errors"]) == (2, 3)


def test_a_run_folder_that_is_removed_is_no_end(run: Path) -> None:
    notes: list[str] = []
    recorder = Recorder(run.parent, notes.append)
    recorder.record(sample(run))
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    recorder.record(sample(run))
    assert notes == [f"{run} cannot be written (No such file or directory): samples are dropped"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(csvlog.os, "open", refuse)
    with pytest.raises(MachineError) as caught:
        Recorder(run.parent, print).record(sample(run))
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert str(run) in caught.value.message
    assert "--no-write" in caught.value.fix


def test_a_damaged_heartbeat_is_none(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"time": 3}', '{"run": "x"}'):
        (tmp_path / heartbeat.NAME).write_text(text)
        assert heartbeat.freshness(tmp_path) is None


def test_the_tables_have_the_documented_columns() -> None:
    made = sample(Path("run"))
    assert ["time", *tables.gpu_record(P40)] == list(tables.GPU_COLUMNS)
    assert ["time", *tables.host_record(made)] == list(tables.HOST_COLUMNS)
