"""The command: output, JSON, exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from patchkit import GSM8K, QueueMaker, contents

from verl_p40.cli.main import run
from verl_p40.errors import ExitCode
from verl_p40.stack import paths


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def call(*args: str, **env: str) -> Done:
    """The command in this process: the same entry point, without starting Python each time."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in {"COLUMNS": "200", "NO_COLOR": "1", **env}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            run(["patches", *args])
    assert isinstance(left.value.code, int)
    return Done(int(left.value.code), out.getvalue(), err.getvalue())


@pytest.fixture
def queue(maker: QueueMaker) -> str:
    return f"--queue={maker.directory}"


def test_list(queue: str, maker: QueueMaker) -> None:
    done = call("list", queue)
    assert done.returncode == 0, done.stderr
    for words in (
        "fix/0001-score",
        "Change something",
        "SomeError: some message",
        "reward_score/gsm8k.py",
    ):
        assert words in done.stdout
    document = json.loads(call("list", queue, "--json").stdout)
    assert document["digest"] == maker.load().digest
    assert [item["group"] for item in document["patches"]] == ["fix", "fix", "p40", "p40"]
    assert document["patches"][0]["files"] == [GSM8K]
    assert document["patches"][3]["header"]["Depends"] == "new-file"


def test_apply_status_revert(queue: str, small: Path, maker: QueueMaker) -> None:
    released = contents(small)
    assert json.loads(call("status", str(small), queue, "--json").stdout)["state"] == "pristine"
    done = call("apply", str(small), queue)
    assert (done.returncode, done.stdout.count("4 patches, 5 files")) == (0, 1), done.stderr
    assert contents(small) == contents(maker.result)
    assert "nothing to do" in call("apply", str(small), queue).stdout
    document = json.loads(call("status", str(small), queue, "--json").stdout)
    assert (document["state"], document["current"]) == ("patched", True)
    done = call("apply", str(small), queue, "--group=fix", "--without", "score", "--json")
    document = json.loads(done.stdout)
    assert document["patches"] == ["fix/0002-new-file.patch"]
    assert document["left_out"] == ["fix/0001-score.patch"]
    assert "a part of this queue" in call("status", str(small), queue).stdout
    assert call("apply", str(small), "--revert").returncode == 0
    assert contents(small) == released
    assert "unpatched already" in call("revert", str(small)).stdout


def test_errors_are_one_line_and_a_code(queue: str, small: Path, tmp_path: Path) -> None:
    (small / GSM8K).write_text("mine\n")
    cases = [
        (("apply", str(small), queue), ExitCode.TREE, f"{GSM8K} (changed)"),
        (("apply", str(tmp_path), queue), ExitCode.TREE, "no folder verl in it"),
        (("apply", str(small), queue, "--group=no"), ExitCode.USAGE, "no group 'no'"),
        (("apply", str(small), "--revert", "--group=fix"), ExitCode.USAGE, "--revert takes no"),
        (("list", f"--queue={tmp_path}"), ExitCode.TREE, "not a patch queue"),
        (("status", str(small), queue, "--against=x"), ExitCode.USAGE, "not both"),
        (("status", queue, "--against=no/such"), ExitCode.USAGE, "neither a folder"),
        (("unpack", str(small), queue), ExitCode.USAGE, "not an empty folder"),
        (("refresh", str(tmp_path), queue), ExitCode.USAGE, "not a git work tree"),
        (("prove", queue), ExitCode.USAGE, "no tests beside it"),
        (("apply", queue), ExitCode.ENVIRONMENT, "is not a verl-p40 environment"),
    ]  # fmt: skip
    for args, code, words in cases:
        done = call(*args, VERL_P40_ENV=str(tmp_path))
        assert (done.returncode, done.stdout) == (code, ""), (args, done.stdout, done.stderr)
        assert done.stderr.startswith("error: "), done.stderr
        assert words in done.stderr.splitlines()[0]
        assert len(done.stderr.splitlines()) <= 2
    assert (small / GSM8K).read_text() == "mine\n"


def test_verify_and_status_exit_with_1_on_findings(
    queue: str, small: Path, maker: QueueMaker
) -> None:
    done = call("verify", queue, "--json")  # the small manifest is not that of the whole release
    assert done.returncode == ExitCode.FOUND, done.stderr
    assert {
        "where": "verl/protocol.py",
        "what": "in the release, but not in the manifest",
    } in json.loads(done.stdout)["findings"]
    done = call("status", queue, f"--against={small}")
    assert (done.returncode, "4 exact" in done.stdout) == (0, True), done.stdout
    (small / GSM8K).write_text("other\n")
    done = call("status", queue, f"--against={small}")
    assert (done.returncode, "2 in conflict" in done.stdout) == (1, True), done.stdout


def test_verify_of_the_real_queue_as_a_process() -> None:
    command = [sys.executable, "-m", "verl_p40.cli.main", "patches", "verify"]
    environ = {**os.environ, "PYTHONPATH": str(paths.package_dir().parent)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "no findings" in done.stdout) == (0, True), done.stdout + done.stderr


def test_prove(small: Path, maker: QueueMaker, tmp_path: Path) -> None:
    tests = maker.directory.parent.parent / "tests"
    tests.mkdir()
    (tests / "test_proof.py").write_text(
        "import os, pathlib\n"
        f"text = (pathlib.Path(os.environ['VERL_P40_TREE']) / '{GSM8K}').read_text()\n"
        "def test_gsm8k(): assert 'HOW = 1' in text\n"
    )
    full = maker.directory / "upstream.sha256"  # prove works on the whole pinned release
    full.write_bytes((paths.patches_dir() / "verl" / "upstream.sha256").read_bytes())
    queue = f"--queue={maker.directory}"
    done = call("prove", "score", queue, "--python", sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 patches proven necessary" in done.stdout
    assert "without fix/0001-score.patch: proven" in done.stderr
    done = call("prove", "more-score", queue, "--python", sys.executable, "--json")
    assert done.returncode == ExitCode.FOUND
    document = json.loads(done.stdout)
    assert document["proven"] is False
    assert [bool(row["problem"]) for row in document["proofs"]] == [True]


def test_unpack_and_refresh(queue: str, maker: QueueMaker, tmp_path: Path) -> None:
    work = str(tmp_path / "work")
    full = maker.directory / "upstream.sha256"
    full.write_bytes((paths.patches_dir() / "verl" / "upstream.sha256").read_bytes())
    manifest = full.read_bytes()
    done = call("unpack", work, queue)
    assert (done.returncode, "4 patch commits" in done.stdout) == (0, True), done.stderr
    done = call("refresh", work, queue, "--json")
    assert len(json.loads(done.stdout)["patches"]) == 4
    assert full.read_bytes() == manifest


def test_every_help_has_an_example() -> None:
    for command in ["list", "apply", "revert", "verify", "status", "unpack", "refresh", "prove"]:
        done = call(command, "--help")
        assert f"Example: verl-p40 patches {command}" in done.stdout


def test_the_project_chooses_the_queue_and_verl_is_the_default(tmp_path: Path) -> None:
    document = json.loads(call("list", "--project", "vllm", "--json").stdout)
    assert (document["project"], document["version"]) == ("vllm", "0.8.5.post1")
    assert json.loads(call("list", "--json").stdout)["project"] == "verl"
    done = call("status", str(tmp_path), "--project", "vllm")
    assert done.stdout == f"{tmp_path}: missing\n"
    done = call("list", "--project", "torch")
    assert done.returncode == ExitCode.USAGE
    assert "no queue is called 'torch'" in done.stderr and "one of: verl, vllm" in done.stderr


def test_source_writes_the_patched_release(tmp_path: Path) -> None:
    done = call("source", str(tmp_path / "verl"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'verl'}: ")
    assert (tmp_path / "verl" / "verl" / "utils" / "device.py").is_file()
    done = call("source", str(tmp_path / "verl"))
    assert done.returncode == ExitCode.USAGE and "not an empty folder" in done.stderr
