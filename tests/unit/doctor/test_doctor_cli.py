"""The command: exit codes, JSON, selection, recordings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.cli import main as cli
from verl_p40.errors import ExitCode

CAPTURES = Path(__file__).parent / "captures"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.run(["doctor", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("p40-520-ecc-on", ExitCode.OK),
        ("p40-525-hot", ExitCode.WARNING),
        ("p40x2-440-too-old", ExitCode.FOUND),
    ],
)
def test_the_exit_code_is_the_worst_state(
    host: str, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--replay", str(CAPTURES / f"{host}.yaml"), "--only", "nvidia,gpu") == code
    assert capsys.readouterr().out.strip()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    host = CAPTURES / "p40x2-440-too-old.yaml"
    assert run("--replay", str(host), "--only", "driver", "--only", "ecc", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["state"] == "failure"
    assert [check["id"] for check in document["checks"]] == ["driver", "ecc"]
    assert document["checks"][0]["facts"] == {"version": "440.33.01", "cuda": "10.2"}
    assert document["counts"]["failure"] == 1


def test_fixes_are_beneath_and_details_only_when_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = str(CAPTURES / "p40x2-470-busy.yaml")
    run("--replay", host, "--only", "gpu-processes")
    brief = capsys.readouterr().out
    assert "> ps -o pid,user,lstart,args -p 21781,23580" in brief
    assert "process 21781 (C) python" not in brief
    run("--replay", host, "--only", "gpu-processes", "-v")
    assert "GPU 0: process 21781 (C) python, 16963 MiB" in capsys.readouterr().out


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    assert "nvidia-runtime" in capsys.readouterr().out
    assert run("--list", "--only", "gpu", "--json") == 0
    assert {check["group"] for check in json.loads(capsys.readouterr().out)} == {"gpu"}


@pytest.mark.parametrize(
    "words",
    [
        ("--only", "nothing"),
        ("--replay", "none.yaml"),
        ("--replay", "a.yaml", "--record", "b.yaml"),
    ],
)
def test_bad_arguments(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == ExitCode.USAGE
    assert "error:" in capsys.readouterr().err


def test_this_machine_recorded_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever this machine is: its recording says the same."""
    file = tmp_path / "host.yaml"
    only = ("--only", "nvidia,gpu,system,cgroup,ulimits", "--json")
    code = run("--record", str(file), *only)
    first = json.loads(capsys.readouterr().out)
    assert run("--replay", str(file), *only) == code
    second = json.loads(capsys.readouterr().out)
    for before, after in zip(first["checks"], second["checks"], strict=True):
        assert (before["id"], before["state"]) == (after["id"], after["state"])
        assert before["text"] == after["text"]
