"""The command as a whole: help, errors and exit codes, for every group."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from click.testing import CliRunner

from verl_p40.cli.main import GROUPS, app, run
from verl_p40.errors import DiskError, ExitCode

COMMAND = typer.main.get_command(app)


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that does something, as the words that call it."""
    if isinstance(command, click.Group):
        if command.invoke_without_command and path:
            yield path
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))
    else:
        yield path


ALL = sorted(commands(COMMAND))


def find(words: tuple[str, ...]) -> click.Command:
    found: click.Command = COMMAND
    for word in words:
        assert isinstance(found, click.Group)
        found = found.commands[word]
    return found


def test_every_group_registered_something() -> None:
    assert {words[0] for words in ALL} >= set(GROUPS)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_says_what_it_does_with_an_example(words: tuple[str, ...]) -> None:
    command = find(words)
    assert command.help, "the first line of its docstring is its help"
    text = f"{command.epilog or ''} {command.help}"
    assert f"verl-p40 {' '.join(words)}" in " ".join(text.split()), "an example to paste"
    result = CliRunner().invoke(COMMAND, [*words, "--help"])
    assert result.exit_code == 0
    assert result.output.strip()


REPORTING = {
    *(("stack", name) for name in ("install", "status", "path", "pins", "fetch", "remove")),
    *(("patches", name) for name in ("list", "apply", "verify", "status", "prove")),
    *(("image", name) for name in ("build", "inspect", "push", "pull", "verify")),
    *(("kernels", name) for name in ("binary", "triton")),
    *(
        ("audit",),
        ("diagnose",),
        ("doctor",),
        ("health",),
        ("monitor",),
        ("presets",),
        ("smoke",),
        ("train",),
    ),
}


@pytest.mark.parametrize("words", sorted(REPORTING), ids=" ".join)
def test_commands_that_report_have_json(words: tuple[str, ...]) -> None:
    assert words in ALL
    assert "--json" in [option for param in find(words).params for option in param.opts]


def code_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        run(list(argv))
    return int(caught.value.code or 0)


def test_an_unknown_command_or_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("trian") == ExitCode.USAGE
    assert "trian" in capsys.readouterr().err
    assert code_of("stack", "pins", "--falvor", "cpu") == ExitCode.USAGE
    assert code_of("stack", "pins", "--flavor", "tpu") == ExitCode.USAGE
    assert "cu118" in capsys.readouterr().err


def test_our_errors_are_one_line_and_a_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskError("no space in [this] folder", fix="free some")

    monkeypatch.setattr("verl_p40.stack.env.ensure", full)
    assert code_of("stack", "install") == ExitCode.DISK
    captured = capsys.readouterr()
    assert captured.err == "error: no space in [this] folder\n  fix: free some\n"
    assert captured.out == ""


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("verl_p40.stack.env.ensure", interrupted)
    assert code_of("stack", "install") == ExitCode.INTERRUPTED


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--version") == ExitCode.OK
    assert capsys.readouterr().out.startswith("verl-p40 ")


def test_pins_as_json_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("stack", "pins", "--json") == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["release"]["verl"]["version"] == "0.4.1"
    assert document["schema"] == 1


def test_nothing_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_P40_HOME", str(tmp_path))
    monkeypatch.delenv("VERL_P40_ENV", raising=False)
    assert code_of("stack", "status", "--json") == ExitCode.FOUND
    assert json.loads(capsys.readouterr().out)["environments"] == []
    assert code_of("stack", "path") == ExitCode.ENVIRONMENT
    assert "verl-p40 stack install" in capsys.readouterr().err
    assert code_of("stack", "remove", "--yes", "--cache") == ExitCode.OK
    assert code_of("stack", "remove", "--json") == ExitCode.USAGE


def test_remove_clears_what_a_killed_install_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_P40_HOME", str(tmp_path))
    half = tmp_path / "envs" / ".build-cpu-py311-0123456789ab" / "lib"
    half.mkdir(parents=True)
    assert code_of("stack", "remove", "--yes", "--json") == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["removed"] == [str(half.parent)]
    assert not half.parent.exists()


def test_no_color_is_honoured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl_p40.cli.main", "stack", "pins"],
        env={"NO_COLOR": "1", "FORCE_COLOR": "", "PATH": "", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b" not in done.stdout
    assert "ray[default]>=2.41" in " ".join(done.stdout.split())


def test_help_is_not_slow() -> None:
    """torch, ray and hydra must not be imported to print a help text."""
    code = (
        "import sys\nfrom verl_p40.cli.main import app\n"
        "print([m for m in ('torch', 'ray', 'hydra', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
