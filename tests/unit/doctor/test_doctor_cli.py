"""The command: exit codes, JSON, selection, recordings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
import typer

from verl_p40 import doctor
from verl_p40.cli import main as cli
from verl_p40.errors import ExitCode

CAPTURES = Path(__file__).parent / "captures"
SOURCES = Path(doctor.__file__).parent


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
        ("--script", "none.sh"),
        ("--data", "none.parquet"),
    ],
)
def test_bad_arguments(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == ExitCode.USAGE
    assert "error" in capsys.readouterr().err.lower()


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


COMMANDS = re.compile(
    r"verl-p40 ([a-z][a-z0-9-]*(?: [a-z][a-z0-9-]*)?)((?: --?[a-z-]+| [\\w./{}%<>-]+)*)"
)


@pytest.mark.parametrize(
    "file",
    [*sorted(SOURCES.rglob("*.py")), *sorted(CAPTURES.glob("*.txt"))],
    ids=lambda path: path.name,
)
def test_every_command_that_is_advised_exists(file: Path) -> None:
    """With its options: advice that cannot be pasted is worse than none."""
    root = typer.main.get_command(cli.app)
    text = " ".join(file.read_text(encoding="utf-8").split()).replace('" "', "").replace('" f"', "")
    for words, rest in COMMANDS.findall(text):
        command: click.Command = root
        for word in words.split():
            if not isinstance(command, click.Group) or word not in command.commands:
                break
            command = command.commands[word]
        if command is root:
            # "verl-p40 train" is there, "verl-p40 of this version" is prose.
            assert words.split()[0] not in {"install", "build"}
            continue
        known = {option for p in command.params for option in p.opts} | {"--help"}
        for option in re.findall(r"(?<= )--?[a-z][a-z-]*", rest):
            assert option in known, f"verl-p40 {words} has no {option}"
