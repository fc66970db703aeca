"""Process trees with plain Python children in place of Ray's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from verl_p40.train import process

PARENT = """
import os, sys
from pathlib import Path
from verl_p40.train import process
process.become_subreaper()
fd = os.open(sys.argv[1] + "/lock", os.O_CREAT | os.O_RDWR)
child = process.start([sys.executable, "-c", sys.argv[2]], env=dict(os.environ),
                      log=Path(sys.argv[1]) / "log", cwd=Path(sys.argv[1]), keep=fd, grace=5.0)
print(child.pid, flush=True)
sys.stdin.readline()
child.kill()
child.wait()
print(process.sweep(patience=0.3), flush=True)
"""
# A trainer whose child leaves its session and does not care who dies, as Ray's workers may.
TRAINER = """
import os, subprocess, sys, time
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(os.getpid(), p.pid, flush=True)
{then}
"""
SLEEP = "time.sleep(300)"


def _gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@dataclass
class Family:
    """A supervisor in a process of its own, its guard, its trainer and the trainer's child."""

    supervisor: subprocess.Popen[str]
    guard: int
    trainer: int
    grandchild: int

    def pids(self) -> list[int]:
        return [self.guard, self.trainer, self.grandchild]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), TRAINER.format(then=SLEEP)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert supervisor.stdout is not None
    guard = int(supervisor.stdout.readline())
    deadline = time.monotonic() + 60
    while not (text := (tmp_path / "log").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    trainer, grandchild = map(int, text.split())
    found = Family(supervisor, guard, trainer, grandchild)
    yield found
    supervisor.kill()
    supervisor.communicate()
    for pid in found.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


linux = pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")


@linux
def test_a_killed_supervisor_takes_everything_with_it(family: Family) -> None:
    family.supervisor.kill()
    assert all(_gone(pid, 20) for pid in family.pids())


@linux
def test_a_killed_guard_leaves_the_rest_to_the_supervisor(family: Family) -> None:
    out, _ = family.supervisor.communicate("go\n", timeout=60)
    assert out.strip() == str([family.grandchild])
    assert all(_gone(pid, 5) for pid in family.pids())


@linux
def test_a_killed_trainer_ends_everything(family: Family) -> None:
    os.kill(family.trainer, signal.SIGKILL)
    assert all(_gone(pid, 20) for pid in family.pids())


@linux
def test_guard_and_trainer_hold_the_lock(family: Family, tmp_path: Path) -> None:
    for pid in (family.guard, family.trainer):
        open_files = [path.resolve() for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert tmp_path / "lock" in open_files


def _start(tmp_path: Path, code: str, grace: float = 10) -> subprocess.Popen[bytes]:
    fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        child = process.start(
            [sys.executable, "-c", code],
            env=dict(os.environ),
            log=tmp_path / "log",
            cwd=tmp_path,
            keep=fd,
            grace=grace,
        )
    finally:
        os.close(fd)
    while b"ready" not in (tmp_path / "log").read_bytes():
        time.sleep(0.05)
    return child


def test_a_trainer_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    polite = "import signal, sys, time\nsignal.signal(15, lambda *a: sys.exit(7))\nprint('ready', flush=True)\ntime.sleep(60)"
    child = _start(tmp_path, polite)
    process.stop(child, grace=30)
    assert child.returncode == 7


def test_a_deaf_trainer_is_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)"
    child = _start(tmp_path, deaf, grace=0.5)
    began = time.monotonic()
    process.stop(child, grace=30)
    assert child.returncode == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - began < 25


def test_output_is_appended_and_the_session_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    child = _start(
        tmp_path,
        "import sys, os\nprint('ready', os.getsid(0), flush=True)\nsys.stderr.write('err\\n')",
    )
    assert child.wait(timeout=30) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "before"
    # The guard leads the session.
    assert f"ready {child.pid}" in lines
    assert "err" in lines


def test_the_trainer_s_exit_code_and_signal_come_through(tmp_path: Path) -> None:
    assert _start(tmp_path, "print('ready', flush=True); raise SystemExit(3)").wait(60) == 3
    dies = "import os; print('ready', flush=True); os.kill(os.getpid(), 11)"
    (tmp_path / "log").unlink()
    assert _start(tmp_path, dies).wait(60) == -signal.SIGSEGV


def test_a_signal_is_a_flag_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with process.interruptible() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == before


def test_ray_s_folder_is_short_and_only_ours_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    folder = process.make_ray_tmp()
    socket = f"{folder}/session_2026-11-30_08-16-05_324000_1234567/sockets/plasma_store"
    assert len(socket) < 107
    assert folder.is_dir()
    process.remove_ray_tmp(tmp_path)
    assert tmp_path.is_dir()
    process.remove_ray_tmp(folder)
    assert not folder.exists()
    process.remove_ray_tmp("")
    assert Path.cwd().is_dir()
