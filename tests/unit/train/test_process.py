"""Process trees with plain Python children in place of Ray's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_p40.train import process

PARENT = """
import os, sys, time
from pathlib import Path
from verl_p40.train import process
process.become_subreaper()
fd = os.open(sys.argv[1] + "/lock", os.O_CREAT | os.O_RDWR)
child = process.start([sys.executable, "-c", sys.argv[2]], env=dict(os.environ),
                      log=Path(sys.argv[1]) / "log", cwd=Path(sys.argv[1]), keep=fd)
print(child.pid, flush=True)
sys.stdin.readline()
{then}
"""
# A trainer whose child leaves its session, as Ray's workers may.
TRAINER = """
import subprocess, sys, time
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(p.pid, flush=True)
time.sleep(60)
"""


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


def _run_parent(tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], int, int]:
    """A supervisor in a process of its own: ``(it, trainer's pid, grandchild's pid)``."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then), str(tmp_path), TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    trainer = int(parent.stdout.readline())
    deadline = time.monotonic() + 30
    while not (text := (tmp_path / "log").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return parent, trainer, int(text)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_the_trainer_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    parent, trainer, grandchild = _run_parent(tmp_path, "time.sleep(60)")
    try:
        parent.kill()
        parent.wait()
        assert _gone(trainer, 10)
    finally:
        os.kill(grandchild, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
def test_sweeping_takes_orphans_too(tmp_path: Path) -> None:
    then = "child.kill(); child.wait(); print(process.sweep(patience=0.3), flush=True)"
    parent, trainer, grandchild = _run_parent(tmp_path, then)
    out, _ = parent.communicate("go\n", timeout=30)
    assert out.strip() == str([grandchild])
    assert _gone(trainer, 1)
    assert _gone(grandchild, 1)


def _start(tmp_path: Path, code: str) -> subprocess.Popen[bytes]:
    fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        child = process.start(
            [sys.executable, "-c", code],
            env=dict(os.environ),
            log=tmp_path / "log",
            cwd=tmp_path,
            keep=fd,
        )
    finally:
        os.close(fd)
    while b"ready" not in (tmp_path / "log").read_bytes():
        time.sleep(0.05)
    return child


def test_a_trainer_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    polite = "import signal, sys, time\nsignal.signal(15, lambda *a: sys.exit(7))\nprint('ready', flush=True)\ntime.sleep(60)"
    child = _start(tmp_path, polite)
    process.stop(child, grace=10)
    assert child.returncode == 7


def test_a_deaf_trainer_is_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)"
    child = _start(tmp_path, deaf)
    began = time.monotonic()
    process.stop(child, grace=0.5)
    assert child.returncode == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - began < 5


def test_output_is_appended_and_the_session_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    child = _start(
        tmp_path,
        "import sys, os\nprint('ready', os.getsid(0), flush=True)\nsys.stderr.write('err\\n')",
    )
    assert child.wait(timeout=30) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "before"
    assert f"ready {child.pid}" in lines
    assert "err" in lines


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
