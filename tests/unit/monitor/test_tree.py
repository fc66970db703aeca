"""Real processes, also in PID namespaces of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runkit import Start, end

from verl_p40.monitor import proc
from verl_p40.monitor.tree import PSS_EVERY, Root, Tree, locate, recorded_pid
from verl_p40.train.folder import RunFolder

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")


@pytest.fixture
def no_lock_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /proc/locks does not name the file, so that NSpid has to do."""
    monkeypatch.setattr(proc, "lock_holders", lambda *_: [])


def _lock(folder: Path) -> Path:
    return RunFolder(folder).lock_file


def test_a_run_of_this_namespace(tmp_path: Path, start_run: Start) -> None:
    child = start_run(tmp_path / "run", 3)
    found = locate(_lock(tmp_path / "run"))
    assert isinstance(found, Root)
    assert found.pid == child.pid


def test_its_numbers_are_psutils(tmp_path: Path, start_run: Start) -> None:
    child = start_run(tmp_path / "run", 3)
    time.sleep(0.5)
    tree = Tree(_lock(tmp_path / "run"))
    sample = tree.sample(0.0)
    assert sample is not None
    family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    assert sample.processes == len(family) == 4
    assert sample.rss == pytest.approx(sum(p.memory_info().rss for p in family), rel=0.05)
    pss = sum(p.memory_full_info().pss for p in family)
    assert sample.pss == pytest.approx(pss, rel=0.05)
    assert sample.pss < sample.rss
    assert sample.cpu_percent is None


def test_cpu_is_what_was_spent_since_the_sample_before(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with run.hold():
        tree = Tree(run.lock_file)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            time.sleep(0.3)
            began = time.monotonic()
            tree.sample(began)
            before = psutil.Process(busy.pid).cpu_times().user
            time.sleep(1.0)
            ended = time.monotonic()
            sample = tree.sample(ended)
            spent = psutil.Process(busy.pid).cpu_times().user - before
        finally:
            busy.kill()
            busy.wait()
    assert sample is not None
    assert sample.cpu_percent is not None
    # This process works a little too; the machine may be busy with others.
    assert sample.cpu_percent == pytest.approx(100 * spent / (ended - began), abs=15)
    assert sample.cpu_percent > 10


def test_processes_that_come_and_go_are_seen(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with run.hold():
        tree = Tree(run.lock_file)
        counts = []
        first = tree.sample(0.0)
        assert first is not None
        come = subprocess.Popen(["sleep", "60"])
        # Found at the latest after ten seconds, by the clock that is handed in.
        counts.append(tree.sample(10.0).processes - first.processes)  # type: ignore[union-attr]
        come.kill()
        come.wait()
        counts.append(tree.sample(10.001).processes - first.processes)  # type: ignore[union-attr]
    assert counts == [1, 0]


def test_pss_is_read_now_and_then(tmp_path: Path, start_run: Start) -> None:
    start_run(tmp_path / "run", 1)
    tree = Tree(_lock(tmp_path / "run"))
    sizes = [tree.sample(at).pss for at in (0.0, 1.0, PSS_EVERY - 1, PSS_EVERY)]  # type: ignore[union-attr]
    assert [size is None for size in sizes] == [False, True, True, False]


@pytest.mark.parametrize("lock_list", [True, False])
def test_a_run_in_a_namespace_below_ours(
    tmp_path: Path, start_run: Start, lock_list: bool, request: pytest.FixtureRequest
) -> None:
    """What a monitor with ``pid: host`` has of a run in another container."""
    if not lock_list:
        request.getfixturevalue("no_lock_list")
    start_run(tmp_path / "run", 2, prefix=NAMESPACE)
    lock = _lock(tmp_path / "run")
    inside = recorded_pid(lock)
    # It is process 1 or 2 there; here those are the machine's first processes.
    assert inside < 10
    found = locate(lock)
    assert isinstance(found, Root), found
    assert found.pid != inside
    assert proc.namespaced_pids(found.pid)[-1] == inside
    assert "pretend_run.py" in proc.command(found.pid)
    sample = Tree(lock).sample(0.0)
    assert sample is not None
    assert sample.processes == 3


def test_from_inside_a_namespace_the_run_outside_is_not_visible_and_the_reason_is_told(
    tmp_path: Path, start_run: Start
) -> None:
    """What a monitor without ``pid: host`` has of it."""
    start_run(tmp_path / "run", 1)
    program = (
        "import sys, pathlib; from verl_p40.monitor.tree import locate; "
        "print(locate(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", program, str(_lock(tmp_path / "run"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "in another PID namespace" in done.stdout
    assert "pid: host" in done.stdout


def test_two_runs_in_namespaces_are_told_apart(
    tmp_path: Path, start_run: Start, no_lock_list: None
) -> None:
    start_run(tmp_path / "one", 1, prefix=NAMESPACE)
    start_run(tmp_path / "two", 1, prefix=NAMESPACE)
    one, two = (locate(_lock(tmp_path / name)) for name in ("one", "two"))
    # Both are the same process there; each has its own lock file open.
    assert recorded_pid(_lock(tmp_path / "one")) == recorded_pid(_lock(tmp_path / "two"))
    assert isinstance(one, Root)
    assert isinstance(two, Root)
    assert one.pid != two.pid
    assert str(tmp_path / "one") in proc.command(one.pid)


def test_a_process_that_only_has_the_number_is_not_taken(
    tmp_path: Path, start_run: Start, no_lock_list: None
) -> None:
    start_run(tmp_path / "run", 0)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        lock = _lock(tmp_path / "run")
        lock.write_text(str(stranger.pid))
        found = locate(lock)
    finally:
        stranger.kill()
        stranger.wait()
    assert isinstance(found, str)
    assert "is not the run's but 'sleep 60'" in found


def test_another_users_run_is_known_by_its_command(
    tmp_path: Path, start_run: Start, no_lock_list: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the right to look at its files, as root without CAP_SYS_PTRACE in a container."""
    child = start_run(tmp_path / "run", 0)
    monkeypatch.setattr(proc, "has_open", lambda *_: None)
    lock = _lock(tmp_path / "run")
    assert isinstance(locate(lock), str)
    monkeypatch.setattr(proc, "command", lambda *_: "python -m verl_p40.cli.main train cpu-demo")
    assert locate(lock) == Root(child.pid, proc.stat(child.pid).started)  # type: ignore[union-attr]
    # One that is younger than the lock cannot have taken it.
    os.utime(lock, (time.time() - 3600,) * 2)
    assert isinstance(locate(lock), str)


def test_a_run_that_has_ended_has_no_processes(tmp_path: Path, start_run: Start) -> None:
    child = start_run(tmp_path / "run", 1)
    tree = Tree(_lock(tmp_path / "run"))
    assert tree.sample(0.0) is not None
    end(child)
    assert tree.sample(10.0) is None
    assert tree.hidden


def test_names_with_spaces_and_parentheses(tmp_path: Path) -> None:
    program = tmp_path / "a) S (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        time.sleep(0.2)
        found = proc.stat(child.pid)
        assert found is not None
        assert (found.parent, found.state) == (os.getpid(), "S")
    finally:
        child.kill()
        child.wait()
