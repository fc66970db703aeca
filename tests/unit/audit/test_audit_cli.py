"""``verl-p40 audit`` as a user calls it: output, JSON, exit codes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from verl_p40.cli.main import run


def _call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run(["audit", *arguments])
    assert isinstance(ended.value.code, int)
    return int(ended.value.code)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")


def test_unpatched_release(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(str(wheel)) == 1
    out = capsys.readouterr().out
    assert "verl 0.4.1 (unpatched)" in out
    assert "FAILURE verl/workers/fsdp_workers.py:216:64 in ActorRolloutRefWorker" in out
    assert "\x1b[" not in out


def test_json_is_one_document(unpatched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(str(unpatched / "verl"), "--json") == 1
    document = json.loads(capsys.readouterr().out)
    (tree,) = document["trees"]
    assert document["ok"] is False
    assert sum(tree["counts"].values()) == len(tree["findings"])
    assert tree["counts"]["FAILURE"] == sum(f["status"] == "FAILURE" for f in tree["findings"])
    assert tree["rules"]["half-cast"]["why"]


def test_pristine_to_compare_with(
    patched: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A patched tree without its notes, e.g. a git checkout, compared with the wheel."""
    import shutil

    copy = tmp_path / "verl"
    shutil.copytree(
        patched / "verl", copy, ignore=shutil.ignore_patterns(".verl-p40*", "__pycache__")
    )
    _call(str(copy), "--pristine", str(wheel), "--json")
    compared = json.loads(capsys.readouterr().out)["trees"][0]
    _call(str(patched), "--json")
    carried = json.loads(capsys.readouterr().out)["trees"][0]
    assert compared["counts"] == carried["counts"]
    assert compared["counts"]["patched"] > 30


def test_fail_on(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(str(wheel), "--fail-on", "never") == 0
    assert _call(str(wheel), "--fail-on", "stale") == 0
    assert _call("-c", "VLLM_DTYPE=float32 x", "--fail-on", "harmful,wrong") == 0
    assert _call("-c", "VLLM_DTYPE=float32 x", "--fail-on", "no-op") == 1
    assert _call("-c", "x", "--fail-on", "surprise") == 2
    assert "unknown level surprise" in capsys.readouterr().err


def test_script_command_and_stdin_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "export VLLM_DTYPE=float32\n"
    script = tmp_path / "train.sh"
    script.write_text(text)
    shebang = tmp_path / "train"
    shebang.write_text("#!/usr/bin/env bash\n" + text)
    outputs = []
    for arguments in (["-c", text], [str(script)], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert _call(*arguments, "--json") == 1
        outputs.append(json.loads(capsys.readouterr().out)["findings"])
    assert outputs[0] == outputs[1] == outputs[2]
    assert _call(str(shebang)) == 1
    out = capsys.readouterr().out
    assert "no-op line 2: VLLM_DTYPE=float32" in out
    assert "instead: actor_rollout_ref.rollout.dtype=float32" in out


def test_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_DTYPE", "float32")
    assert _call("--environment") == 1
    assert "VLLM_DTYPE=float32" in capsys.readouterr().out


def test_clean_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _call("-c", "python train.py") == 0
    assert "the settings are fine" in capsys.readouterr().out


def test_unreadable_script_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert _call("-c", "echo 'x") == 0
    assert "not read to the end: line 1: no closing '" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.whl"], 2, "missing.whl does not exist"),
        (["-c", "x", "--environment"], 2, "give one of PATH"),
        (["."], 6, "no verl or vllm package"),
    ],
)
def test_bad_input(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _call(*arguments) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_no_stack_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_P40_HOME", str(tmp_path))
    monkeypatch.delenv("VERL_P40_ENV", raising=False)
    assert _call() == 3
    assert "verl-p40 stack install" in capsys.readouterr().err


def test_binary_script_and_odd_pristine(
    tmp_path: Path, wheel: Path, vllm_sdist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "x.sh"
    script.write_bytes(b"a\0b")
    assert _call(str(script)) == 2
    assert "not a text file" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert _call("--help") == 0
    assert "Examples: verl-p40 audit" in capsys.readouterr().out
