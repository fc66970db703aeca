from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from runkit import Start, end

from verl_p40.errors import BusyError
from verl_p40.monitor import finder as finder_module
from verl_p40.monitor.finder import Finder, is_locked
from verl_p40.train.folder import RunFolder


def _run(runs: Path, name: str, *, age: float = 0.0, lock: bool = True) -> RunFolder:
    run = RunFolder(runs / name)
    run.path.mkdir(parents=True)
    run.add_event("start", step=0)
    if lock:
        run.lock_file.write_text("1")
    if age:
        for path in run.path.iterdir():
            os.utime(path, (time.time() - age,) * 2)
    return run


def test_no_folder_no_run(tmp_path: Path) -> None:
    assert Finder(tmp_path / "runs").look() is None


def test_the_held_run_is_active_however_new_another_is(tmp_path: Path, start_run: Start) -> None:
    start_run(tmp_path / "held")
    _run(tmp_path, "newer")
    active = Finder(tmp_path).look()
    assert active is not None
    assert (active.run.name, active.held, active.others) == ("held", True, ())


def test_it_moves_on_when_a_run_ends_and_another_starts(tmp_path: Path, start_run: Start) -> None:
    finder = Finder(tmp_path)
    first = start_run(tmp_path / "one")
    assert finder.look().run.name == "one"  # type: ignore[union-attr]
    end(first)
    # Its files are seconds old, and yet it has ended.
    assert finder.look() is None
    start_run(tmp_path / "two")
    assert finder.look().run.name == "two"  # type: ignore[union-attr]
    start_run(tmp_path / "one")
    again = finder.look()
    assert again is not None
    # It stays with the run it follows, and tells of the other.
    assert (again.run.name, again.others) == ("two", ("one",))


def test_a_run_that_is_named_is_the_only_one(tmp_path: Path, start_run: Start) -> None:
    other = _run(tmp_path, "other")
    start_run(tmp_path / "held")
    assert Finder(tmp_path, other).look() is None


def test_without_a_lock_new_files_count_for_two_minutes(tmp_path: Path) -> None:
    _run(tmp_path, "old", age=finder_module.RECENT + 5, lock=False)
    assert Finder(tmp_path).look() is None
    _run(tmp_path, "new", age=20, lock=False)
    newest = _run(tmp_path, "newest", age=10, lock=False)
    active = Finder(tmp_path).look()
    assert active is not None
    assert (active.run, active.held) == (newest, False)


def test_what_the_monitor_writes_does_not_keep_a_run_active(tmp_path: Path) -> None:
    run = _run(tmp_path, "dead", age=finder_module.RECENT + 5, lock=False)
    (run.path / "host.csv").write_text("time\n")
    assert Finder(tmp_path).look() is None


def test_looking_does_not_stand_in_the_way_of_a_run_that_starts(tmp_path: Path) -> None:
    """A free lock is taken for an instant at the first look, and not again until it is written."""
    run = _run(tmp_path, "free")
    finder = Finder(tmp_path)
    assert finder.look() is None
    probes: list[Path] = []
    real = finder_module.is_locked

    def counting(path: Path) -> bool | None:
        probes.append(path)
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finder_module, "is_locked", counting)
        for _ in range(5):
            assert finder.look() is None
        assert probes == []
        with run.hold():
            active = finder.look()
            assert active is not None
            assert active.held
        assert probes == [run.lock_file]


def test_two_that_look_do_not_see_each_other(tmp_path: Path) -> None:
    run = _run(tmp_path, "free")
    fd = os.open(run.lock_file, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert is_locked(run.lock_file) is False
    finally:
        os.close(fd)


def test_a_supervisor_is_still_refused_a_held_folder_that_is_looked_at(
    tmp_path: Path, start_run: Start
) -> None:
    start_run(tmp_path / "held")
    finder = Finder(tmp_path)
    finder.look()
    with pytest.raises(BusyError), RunFolder(tmp_path / "held").hold(patience=0.1):
        pass


def test_hidden_folders_and_files_are_no_runs(tmp_path: Path) -> None:
    _run(tmp_path, ".trash", lock=False)
    (tmp_path / "notes.txt").write_text("x")
    assert Finder(tmp_path).look() is None
