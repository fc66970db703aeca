"""``verl-p40 diagnose``: inputs, exit codes, JSON."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from verl_p40.cli.main import run
from verl_p40.errors import ExitCode
from verl_p40.train.folder import RunFolder

LOG = "RuntimeError: FlashAttention only supports Ampere GPUs or newer.\n"


def code_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        run(["diagnose", *argv])
    return int(caught.value.code or 0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text("starting\n" + LOG)
    return path


def test_a_cause_with_its_evidence_and_fix(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(str(log)) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("cause: FlashAttention was asked to run on a card older")
    assert f"{log}:2" in out
    assert "confidence: high" in out
    assert "attn_implementation=eager" in out


def test_json_is_json_alone(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(str(log), "--json") == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["result"] == "cause"
    (cause,) = document["causes"]
    assert cause["kind"] == "flash-attn-arch-unsupported"
    assert cause["evidence"] == [{"where": f"{log}:2", "text": LOG.strip(), "process": ""}]


def test_nothing_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.log"
    path.write_text("hello\nFluxError: out of plutonium\n")
    assert code_of(str(path)) == ExitCode.FOUND
    out = capsys.readouterr().out
    assert "nothing known found" in out
    assert f"{path}:2" in out


def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LOG.encode())))
    assert code_of("-") == ExitCode.OK
    assert "standard input:1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "raw", [gzip.compress(LOG.encode()), b"\xff\xfe" + LOG.encode("utf-16-le")], ids=["gzip", "utf-16"]
)  # fmt: skip
def test_packed_or_written_by_powershell(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(raw)
    assert code_of(str(path)) == ExitCode.OK


def test_a_run_by_folder_by_name_and_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "runs" / "p40-ppo")
    folder.path.mkdir(parents=True)
    folder.log.write_text(LOG)
    monkeypatch.chdir(tmp_path)
    assert code_of(str(folder.path)) == ExitCode.OK
    assert code_of("p40-ppo") == ExitCode.OK
    assert code_of() == ExitCode.OK


@pytest.mark.parametrize("what", ["missing", "empty", "binary", "folder", "cut gzip"])
def test_unreadable(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "input"
    if what == "empty":
        path.touch()
    elif what == "binary":
        path.write_bytes(bytes(range(32)) * 100)
    elif what == "folder":
        path.mkdir()
    elif what == "cut gzip":
        path.write_bytes(gzip.compress(LOG.encode() * 99)[:40])
    assert code_of(str(path)) == ExitCode.DATA
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.out == ""


def test_no_runs_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of() == ExitCode.DATA
