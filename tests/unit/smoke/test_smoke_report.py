"""The report: whole or not there, without anyone in it, and as documented."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import probes
import pytest

from verl_p40.cli import smoke as command
from verl_p40.cli.main import run as run_cli
from verl_p40.errors import DiskError, ExitCode, MachineError
from verl_p40.smoke import catalog, report
from verl_p40.smoke.model import Check
from verl_p40.stack import env as stack_env
from verl_p40.stack import paths
from verl_p40.stack.env import StackEnv

Probe = Callable[..., Check]
DOCUMENT = Path(__file__).parents[3] / "docs" / "smoke.md"


@pytest.fixture
def home(tmp_path: Path, stack: StackEnv, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command in a folder of its own, with this interpreter as the stack."""
    monkeypatch.setenv("VERL_P40_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MY_API_KEY", "abcdefgh-12345")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stack_env, "ensure", lambda *args, **kwargs: stack)
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    choose = catalog.choose
    monkeypatch.setattr(
        catalog, "choose", lambda only, skip, *, fast: choose(only, skip, fast=fast, checks=checks)
    )


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        run_cli(["smoke", "--device", "cpu", *words])
    return int(left.value.code or 0)


def test_a_good_run(
    home: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, probe("good"), probe("skipping"))
    assert call() == ExitCode.OK
    out = capsys.readouterr().out
    assert re.search(r"^ok       good +\d+\.\d s  computed on cpu  \[CPU run\]$", out, re.MULTILINE)
    assert re.search(r"^skipped  skipping .*there is nothing to see here$", out, re.MULTILINE)
    assert "1 ok, 1 skipped, 0 failed in" in out
    (file,) = (home / "runs" / "smoke").iterdir()
    assert re.fullmatch(r"smoke-\d{8}T\d{6}Z\.json", file.name)
    document = json.loads(file.read_text())
    assert document["schema_version"] == report.SCHEMA_VERSION
    assert document["verdict"] == "ok"
    assert document["counts"] == {"ok": 1, "skipped": 1, "failed": 0}


def test_a_failed_run_is_exit_1_and_keeps_the_log(
    home: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, probe("abort"), probe("good"))
    assert call("--json", "--report", "out/r.json") == ExitCode.FOUND
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(home / "out" / "r.json")
    assert printed["logs"] == [str(home / "out" / "r-abort.log")]
    assert "LLVM ERROR" in (home / "out" / "r-abort.log").read_text()
    document = json.loads((home / "out" / "r.json").read_text())
    assert {k: v for k, v in printed.items() if k not in ("report", "logs")} == document
    assert [c["verdict"] for c in document["checks"]] == ["failed", "ok"]
    assert "SIGABRT" in document["checks"][0]["text"]
    # Nothing half-written, nothing left in the temporary folder.
    assert sorted(p.name for p in (home / "out").iterdir()) == ["r-abort.log", "r.json"]


def test_nobody_is_in_the_report_or_the_log(
    home: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure texts that hold host, user, home, folder, address, identifiers and secrets."""
    use(monkeypatch, probe("personal"), probe("good"))
    assert call("--report", "r.json") == ExitCode.FOUND
    document = json.loads(Path("r.json").read_text())
    (log,) = home.glob("*.log")
    assert len(document["checks"][0]["output"]) == 6  # the text was there to be scrubbed
    words = [
        socket.gethostname(),
        getpass.getuser(),
        str(Path.home()),
        str(home),
        str(home.resolve()),
        home.name,
        os.environ["MY_API_KEY"],
        *("jane", "8c1b7a52", "3B:00.0", "0324617012345", "192.168.7.31", "fe80:", "hf_abc"),
        *("pw12345", "mirror.example", "disk-of", "secret.bin"),
    ]
    for text in (Path("r.json").read_text(), log.read_text()):
        for word in words:
            found = re.search(rf"(?<![A-Za-z0-9_-]){re.escape(word)}(?![A-Za-z0-9_-])", text, re.I)
            assert not found, f"{word!r} in {text[max(0, found.start() - 60) : found.end() + 20]!r}"


def test_the_documented_fields_are_the_reports(
    home: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, probe("failing"))
    call("--report", "r.json")
    document = json.loads(Path("r.json").read_text())
    documented = set(re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert documented == set(_fields(document)) | {
        "machine.gpus[].name",
        "machine.gpus[].memory_mib",
        "machine.gpus[].used_mib",
        "machine.gpus[].compute_capability",
    }


def _fields(document: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names; what is free (details, versions) or counts is one field."""
    found = []
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and key not in ("details", "versions", "counts"):
            found += _fields(value, f"{name}.")
        elif key == "checks":
            found += _fields(value[0], "checks[].")
        elif key != "gpus":
            found.append(name)
    return found


def test_every_check_is_documented() -> None:
    documented = re.findall(r"^\| \*\*(\w+)\*\* \|", DOCUMENT.read_text(), re.MULTILINE)
    assert documented == [check.name for check in catalog.CHECKS]


def test_a_place_that_cannot_be_written_is_one_line_before_any_check(
    home: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, probe("needs_the_scratch"))
    (home / "file").write_text("")
    assert call("--report", "file/r.json") == ExitCode.ENVIRONMENT
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 2
    assert f"cannot write the report {home}/file/r.json: a part of its path is a file" in lines[0]
    assert "--report" in lines[1]


def test_a_report_that_is_a_folder(home: Path) -> None:
    with pytest.raises(MachineError, match="is a folder"):
        report.reserve(home)


FULL = """
import sys
from pathlib import Path
from verl_p40.errors import VerlP40Error
from verl_p40.smoke import report
path = Path(sys.argv[1]) / "r.json"
try:
    report.reserve(path)
except VerlP40Error as error:
    print(type(error).__name__, error.message)
try:
    report.write(path, {"a": "x" * 500_000})
except VerlP40Error as error:
    print(type(error).__name__, error.message)
print(sorted(p.name for p in path.parent.iterdir()))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one: a memory file system of 128 KiB in a mount namespace of its own."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare on this machine")
    folder = tmp_path / "disk"
    folder.mkdir()
    script = (
        f"mount -t tmpfs -o size=128k tmpfs {folder} && "
        f"head -c 100000 /dev/zero > {folder}/other && "
        f'{sys.executable} -c "$CODE" {folder}'
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        env={
            **os.environ,
            "CODE": FULL,
            "PYTHONPATH": str(paths.package_dir().parent),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        text=True,
        capture_output=True,
    )
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("no user namespaces here")
    first, second, left = done.stdout.splitlines()
    for line in (first, second):
        assert line == f"DiskError cannot write the report {folder}/r.json: the disk is full"
    assert left == "['other']"


def test_an_old_report_survives_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    report.write(path, {"n": 1})

    def full(*args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DiskError):
        report.write(path, {"n": 2})
    assert json.loads(path.read_bytes()) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_names_of_default_reports_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_RUNS", "/r")
    made = report.default_path(datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc))
    assert made == Path("/r/smoke/smoke-20260102T030405Z.json")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--list", "--json", "--fast") == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["checks"]
    assert [row["name"] for row in rows] == [c.name for c in catalog.CHECKS if not c.dear]
    assert call("--list") == ExitCode.OK
    assert "checkpoint" in capsys.readouterr().out


def test_wrong_names_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--only", "tritn") == ExitCode.USAGE
    assert "no check 'tritn'; nearest: triton" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_cli(["smoke", "--help"])
    assert "verl-p40 smoke --fast" in " ".join(capsys.readouterr().out.split())


def test_sigterm_leaves_nothing(home: Path, stack: StackEnv) -> None:
    """`docker stop` in the middle of a check: exit 130, no process, no scratch folder."""
    code = (
        "import sys\nfrom verl_p40.stack import env\nfrom verl_p40.smoke import catalog\n"
        "from verl_p40.smoke.model import Check\n"
        "from verl_p40.stack.record import EnvRecord\nfrom pathlib import Path\n"
        "record = EnvRecord(flavor='cpu', python='3.10', lock_digest='0' * 64, created='x')\n"
        "stack = env.StackEnv(Path(sys.prefix), Path(sys.executable), record)\n"
        "env.ensure = lambda *a, **k: stack\n"
        "hang = Check('hang', 'hangs', 'probes:hang', gpu='none', grace=0.2)\n"
        "catalog.choose = lambda *a, **k: (hang,)\n"
        "from verl_p40.cli.main import run\nrun(['smoke', '--device', 'cpu'])\n"
    )
    scratch = home / "tmp"
    scratch.mkdir()
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**stack.environ(), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = _wait_for_pids(scratch)
    started.terminate()
    _, said = started.communicate(timeout=30)
    assert started.returncode == ExitCode.INTERRUPTED, said
    assert said.strip() in ("", "interrupted")  # typer or cli.main, whoever is first
    assert list(scratch.iterdir()) == []
    import psutil

    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert list((home / "runs" / "smoke").iterdir()) == []


def _wait_for_pids(scratch: Path) -> list[int]:
    import time

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for file in scratch.glob("*/pids"):
            words = file.read_text().split()
            if len(words) == 2:
                return [int(word) for word in words]
        time.sleep(0.1)
    raise AssertionError("the check did not start")


def test_the_probes_are_what_the_test_thinks() -> None:
    assert "serial" in probes.PRIVATE
    assert command.smoke.__doc__
