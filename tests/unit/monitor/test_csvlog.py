from __future__ import annotations

import csv
import errno
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from verl_p40.monitor.csvlog import CsvLog, segments

COLUMNS = ("time", "name", "value")


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_header_then_rows_and_nothing_for_none(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    log = CsvLog(path, COLUMNS)
    log.append([["t1", "a, b", 1.5], ["t1", "c", None]])
    log.append([["t2", "d", 2]])
    assert path.read_text() == 'time,name,value\nt1,"a, b",1.5\nt1,c,\nt2,d,2\n'


@pytest.mark.parametrize("damage", ["t2,half", "t2", "\0" * 70_000])
def test_a_last_line_without_its_end_is_cut_off_at_a_restart(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "gpu.csv"
    CsvLog(path, COLUMNS).append([["t1", "a", 1]])
    with path.open("a") as file:
        file.write(damage)
    CsvLog(path, COLUMNS).append([["t3", "c", 3]])
    assert _rows(path) == [list(COLUMNS), ["t1", "a", "1"], ["t3", "c", "3"]]


def test_a_header_without_its_end_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text("time,na")
    CsvLog(path, COLUMNS).append([["t1", "a", 1]])
    assert _rows(path) == [list(COLUMNS), ["t1", "a", "1"]]


def test_a_file_with_other_columns_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text("time,power\nt0,3\n")
    CsvLog(path, COLUMNS).append([["t1", "a", 1]])
    assert segments(path) == [tmp_path / "gpu.1.csv", path]
    assert (tmp_path / "gpu.1.csv").read_text() == "time,power\nt0,3\n"
    assert _rows(path) == [list(COLUMNS), ["t1", "a", "1"]]


def test_the_size_is_bounded_and_the_newest_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    log = CsvLog(path, COLUMNS, max_bytes=200, keep=2)
    for number in range(100):
        log.append([[f"t{number:03}", "name", number]])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu.1.csv", "gpu.2.csv", "gpu.csv"]
    assert all(p.stat().st_size < 250 for p in tmp_path.iterdir())
    kept = [row for one in segments(path) for row in _rows(one) if row != list(COLUMNS)]
    numbers = [int(row[2]) for row in kept]
    assert numbers == list(range(numbers[0], 100))
    assert len(numbers) > 20
    assert all(_rows(one)[0] == list(COLUMNS) for one in segments(path))


def test_a_file_that_is_taken_away_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    log = CsvLog(path, COLUMNS)
    log.append([["t1", "a", 1]])
    path.unlink()
    log.append([["t2", "b", 2]])
    assert _rows(path) == [list(COLUMNS), ["t2", "b", "2"]]


def test_what_fits_only_in_part_is_not_written_at_all(tmp_path: Path) -> None:
    """A file size limit lets the first part of a write through, as a filling disk does."""
    path = tmp_path / "gpu.csv"
    log = CsvLog(path, COLUMNS)
    log.append([["t1", "a", 1]])
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
        with pytest.raises(OSError):
            log.append([["t2", "bbbbbbbbbb", 2]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    log.append([["t3", "c", 3]])
    assert _rows(path) == [list(COLUMNS), ["t1", "a", "1"], ["t3", "c", "3"]]


def test_a_full_disk_leaves_whole_lines_and_room_brings_it_back(tmp_path: Path) -> None:
    """On a file system of 64 KiB, in a mount namespace of its own."""
    program = textwrap.dedent(f"""
        import errno, pathlib
        from verl_p40.monitor.csvlog import CsvLog
        home = pathlib.Path({str(tmp_path)!r})
        log = CsvLog(home / "gpu.csv", {COLUMNS!r})
        ballast = home / "ballast"
        ballast.write_bytes(bytes(40_000))
        written = 0
        try:
            for written in range(10_000):
                log.append([["t", "name", written]])
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        else:
            raise SystemExit("the disk never filled")
        text = (home / "gpu.csv").read_text()
        assert text.endswith(f"t,name,{{written - 1}}\\n"), text[-40:]
        ballast.unlink()
        log.append([["t", "name", "again"]])
        assert (home / "gpu.csv").read_text() == text + "t,name,again\\n"
        print("rows", written)
    """)
    mount = f'mount -t tmpfs -o size=64k none {tmp_path} && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, program], capture_output=True, text=True
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 100


def test_a_missing_folder_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        CsvLog(tmp_path / "gone" / "gpu.csv", COLUMNS).append([["t", "a", 1]])
    assert caught.value.errno == errno.ENOENT
