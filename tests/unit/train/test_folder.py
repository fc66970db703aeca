from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_p40.errors import BusyError, DataError, MachineError
from verl_p40.train.folder import RunFolder, next_free, write_whole

HOLDER = """
import sys, time
from pathlib import Path
from verl_p40.train.folder import RunFolder
with RunFolder(Path(sys.argv[1])).hold():
    print("held", flush=True)
    time.sleep(60)
"""


def _holder(run: RunFolder) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_two_processes_cannot_hold_a_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r")
    run.check_free()
    other = _holder(run)
    try:
        assert run.holder() == other.pid
        with pytest.raises(BusyError, match=f"in use by process {other.pid}"):
            run.check_free()
        began = time.monotonic()
        with pytest.raises(BusyError), run.hold():
            pass
        assert time.monotonic() - began < 2
    finally:
        other.kill()
        other.wait()
    run.check_free()
    with run.hold():
        assert run.lock_file.read_text() == f"{os.getpid()} {socket.gethostname()}"
    assert run.holder() is None


def test_the_lock_outlives_a_killed_holder_with_its_child(tmp_path: Path) -> None:
    """A trainer inherits the lock: while it lives, nobody else starts in the folder."""
    run = RunFolder(tmp_path / "r")
    with run.hold() as fd:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[fd]
        )
    # The holder that the file names is this process, alive: say it was another, and dead.
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    run.lock_file.write_bytes(dead.stdout.strip())
    began = time.monotonic()
    with pytest.raises(BusyError), run.hold(patience=0.5):
        pass
    assert time.monotonic() - began >= 0.5
    child.kill()
    child.wait()
    with run.hold(patience=0.5):
        pass


def test_a_holder_in_another_container_is_named_with_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r")
    other = _holder(run)
    try:
        run.lock_file.write_text(f"{os.getpid()} 3f2a9c")
        with (
            pytest.raises(BusyError, match=f"process {os.getpid()} of host or container 3f2a9c"),
            run.hold(),
        ):
            pass
    finally:
        other.kill()
        other.wait()


def test_a_glance_at_the_lock_refuses_nobody(tmp_path: Path) -> None:
    """Whoever looks whether a folder is held takes its lock for an instant."""
    run = RunFolder(tmp_path)
    run.lock_file.write_text(str(os.getpid()))
    with run.lock_file.open() as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        timer = threading.Timer(0.25, glance.close)
        timer.start()
        with run.hold():
            pass
        timer.join()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(MachineError, match="cannot write the run folder"),
        RunFolder(tmp_path / "file" / "r").hold(),
    ):
        pass


def test_events_survive_a_half_written_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_events() == []
    run.add_event("start", step=0, total=4)
    with run.events.open("ab") as file:
        file.write(b'{"time": "2026')
    run.add_event("resume", step=2)
    assert [(e["event"], e["step"]) for e in run.read_events()] == [("start", 0), ("resume", 2)]


def test_finished_is_what_the_last_attempt_says(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.add_event("start", step=0)
    run.add_event("checkpoint", step=4)
    assert run.finished_at() is None
    run.add_event("end", step=4)
    assert run.finished_at() == 4
    run.add_event("resume", step=4)
    run.add_event("failure", step=5)
    assert run.finished_at() is None
    run.add_event("stopped", step=5, checkpoint=5)
    assert run.finished_at() is None


def test_next_free_numbers_from_two(tmp_path: Path) -> None:
    base = RunFolder(tmp_path / "r")
    assert next_free(base) == base
    base.path.mkdir()
    assert next_free(base).name == "r-2"
    (tmp_path / "r-2").mkdir()
    assert next_free(base).name == "r-3"


def test_a_damaged_config_is_a_clear_error(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config.write_text("a: [1")
    with pytest.raises(DataError, match=r"config\.yaml cannot be read"):
        run.read_config()
    assert run.read_env() == {}


def test_writing_whole_leaves_nothing_beside(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "two")]
