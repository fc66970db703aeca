"""What a diagnosis tells people to type or to read is really there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from verl_p40.cli.main import app
from verl_p40.diagnose import advice, memory
from verl_p40.diagnose.model import rules

ROOT = Path(__file__).resolve().parents[3]
COMMAND = re.compile(r"verl-p40 (?P<words>[a-z][a-z0-9-]*(?: [a-z][a-z0-9-]*)*)(?P<rest>[^#;`,)]*)")
OPTION = re.compile(r"(?<=\s)--[a-z][a-z-]*")
ROOT_COMMAND: click.Command = typer.main.get_command(app)
PROSE = ("on", "and", "names", "finds", "lists", "tells", "gives", "needs")


def texts() -> Iterator[tuple[str, str]]:
    for rule in rules():
        for text in (*(one.do for one in rule.fix), rule.why, rule.cause):
            yield rule.id, text
    for module in (memory, advice):
        yield module.__name__, Path(str(module.__file__)).read_text()
    view = ROOT / "src" / "verl_p40" / "cli" / "diagnose_view.py"
    yield "diagnose_view", view.read_text()


MENTIONS = [
    (where, match["words"], match["rest"])
    for where, text in texts()
    for match in COMMAND.finditer(text)
]


@pytest.mark.parametrize(("where", "words", "rest"), MENTIONS)
def test_every_command_that_a_fix_names_exists(where: str, words: str, rest: str) -> None:
    command: click.Command = ROOT_COMMAND
    for word in words.split():
        if not isinstance(command, click.Group) or word in PROSE:
            break
        assert word in command.commands, f"{where}: verl-p40 {words}"
        command = command.commands[word]
    assert not isinstance(command, click.Group), f"{where}: verl-p40 {words} is a group"
    known = {name for param in command.params for name in param.opts}
    for option in OPTION.findall(f" {rest}"):
        assert option in known, f"{where}: verl-p40 {words} has no {option}"


def test_the_commands_were_found() -> None:
    assert len({words for _, words, _ in MENTIONS}) > 8


def test_what_there_is_to_read_is_there() -> None:
    named = {name for rule in rules() for name in rule.read}
    named |= {name for _, text in texts() for name in re.findall(r"docs/[\w-]+\.md", text)}
    assert {
        name for name in named if not name.startswith("https://") and not (ROOT / name).is_file()
    } == set()
