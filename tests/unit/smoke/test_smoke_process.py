"""However a check ends, its line says so, and nothing of it is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from verl_p40.smoke.model import Check, Context, Result
from verl_p40.smoke.process import run_check
from verl_p40.stack.env import StackEnv

Probe = Callable[..., Check]
Run = Callable[[Check], Result]


@pytest.fixture
def run(stack: StackEnv, tmp_path: Path) -> Run:
    context = Context("cpu", tmp_path)
    return lambda check: run_check(check, context, stack, tmp_path / f"{check.name}.log")


def test_a_check_that_passes(run: Run, probe: Probe) -> None:
    result = run(probe("good"))
    assert (result.verdict, result.text, result.category) == ("ok", "computed on cpu", "CPU run")
    assert result.details["pid"] > 0
    assert result.output == ()
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("name", "verdict", "text"),
    [
        ("skipping", "skipped", "there is nothing to see here"),
        ("failing", "failed", "two and two are five"),
        ("raising", "failed", "ValueError: a line and another"),
        ("our_error", "failed", "verl is not patched - verl-p40 patches apply"),
    ],
)
def test_a_check_that_says_how_it_ended(
    run: Run, probe: Probe, name: str, verdict: str, text: str
) -> None:
    result = run(probe(name))
    assert (result.verdict, result.text) == (verdict, text)


def test_a_failed_check_keeps_its_figures_and_its_last_lines(run: Run, probe: Probe) -> None:
    result = run(probe("failing"))
    assert result.details == {"sum": 5}
    assert result.output == ("some output",)


@pytest.mark.parametrize(
    ("name", "signal", "cause"),
    [
        ("abort", "SIGABRT", "LLVM ERROR: Cannot select: shfl.sync.bfly"),
        ("segfault", "SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("killed", "SIGKILL", ""),
    ],
)
def test_a_crash_names_the_signal_and_the_cause(
    run: Run, probe: Probe, name: str, signal: str, cause: str
) -> None:
    result = run(probe(name))
    assert result.verdict == "failed"
    assert f"killed by {signal}" in result.text
    assert cause in result.text
    assert "\n" not in result.text


def test_a_process_that_just_ends(run: Run, probe: Probe) -> None:
    result = run(probe("quiet_exit"))
    assert result.verdict == "failed"
    assert result.text == "its process ended without a result, exit code 3: last words"


def test_a_crash_after_the_check_is_a_failure(run: Run, probe: Probe) -> None:
    result = run(probe("dying_late"))
    assert result.verdict == "failed"
    assert result.text == "its process ended badly after the check, killed by SIGABRT"


def test_an_entry_that_is_not_there(run: Run, probe: Probe) -> None:
    result = run(probe("no_such_function"))
    assert result.verdict == "failed"
    assert "no_such_function" in result.text


def test_a_check_that_hangs_is_ended_with_all_it_started(
    run: Run, probe: Probe, tmp_path: Path
) -> None:
    began = time.monotonic()
    result = run(probe("hang", limit=6.0, grace=0.5))
    assert time.monotonic() - began < 30
    assert (result.verdict, result.text) == ("failed", "not done after its limit of 6 s")
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(_alive(pid) for pid in pids)


def test_nothing_is_left_behind_by_a_check_that_passes(
    run: Run, probe: Probe, tmp_path: Path
) -> None:
    assert run(probe("leaving")).verdict == "ok"
    assert not _alive(int((tmp_path / "pids").read_text()))


def test_an_earlier_result_is_not_taken_for_this_one(run: Run, probe: Probe) -> None:
    check = probe("good")
    assert run(check).verdict == "ok"
    assert run(probe("good", limit=0.0, grace=0.0)).verdict == "failed"


def test_the_cpu_checks_see_no_gpu(stack: StackEnv, probe: Probe, tmp_path: Path) -> None:
    from verl_p40.smoke.process import _environ

    hidden = _environ(stack, probe("good"), Context("cpu", tmp_path))
    assert hidden["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in {
        k: v
        for k, v in _environ(stack, probe("good"), Context("cuda", tmp_path)).items()
        if v == ""
    }


def _alive(pid: int) -> bool:
    """Waits a moment: a killed orphan is reaped by whoever adopted it."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)
    return True


def test_a_check_dies_with_the_command(stack: StackEnv, tmp_path: Path) -> None:
    """kill -9 on the command: the check's own process goes too."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from verl_p40.smoke.model import Check, Context\n"
        "from verl_p40.smoke.process import run_check\n"
        "from verl_p40.stack.env import StackEnv\nfrom verl_p40.stack.record import EnvRecord\n"
        "record = EnvRecord(flavor='cpu', python='3.10', lock_digest='0' * 64, created='x')\n"
        "stack = StackEnv(Path(sys.prefix), Path(sys.executable), record)\n"
        "folder = Path(sys.argv[1])\n"
        "check = Check('hang', 'hangs', 'probes:hang', gpu='none')\n"
        "run_check(check, Context('cpu', folder), stack, folder / 'log')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    started = subprocess.Popen(command, env=stack.environ())
    deadline = time.monotonic() + 60
    file = tmp_path / "pids"
    while not (file.exists() and len(file.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    check, grandchild = (int(word) for word in file.read_text().split())
    started.kill()
    started.wait()
    try:
        assert not _alive(check)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(grandchild).kill()
