"""The line between the light command and the stack's Python, with real child processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl_p40.data import child
from verl_p40.errors import DataError, NetworkError
from verl_p40.stack.env import StackEnv
from verl_p40.stack.record import EnvRecord

CHILD = """
import sys
from verl_p40.data import child
from verl_p40.errors import NetworkError

def work():
    print("a library says something")
    print('{{"result": "and prints JSON"}}', file=sys.stderr)
    child.say("half way", 0.5)
    {body}

raise SystemExit(child.serve(work))
"""


@pytest.fixture
def env() -> StackEnv:
    record = EnvRecord(
        flavor="cpu", python="3.10", lock_digest="0" * 64, created="2025-01-01T00:00:00Z"
    )
    return StackEnv(Path(sys.prefix), Path(sys.executable), record)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def make(body: str) -> str:
        (tmp_path / "a_child.py").write_text(CHILD.format(body=body))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "a_child"

    return make


def test_result_and_progress(env: StackEnv, module) -> None:  # type: ignore[no-untyped-def]
    told: list[tuple[str, float | None]] = []
    result = child.call(
        env, module("return {'rows': 3}"), [], lambda text, done: told.append((text, done))
    )
    assert result == {"rows": 3}
    assert told == [("half way", 0.5)]


def test_the_childs_error_arrives_as_itself(env: StackEnv, module) -> None:  # type: ignore[no-untyped-def]
    body = "raise NetworkError('no route', fix='plug it in')"
    with pytest.raises(NetworkError, match="no route") as caught:
        child.call(env, module(body), [])
    assert caught.value.fix == "plug it in"


def test_an_unreadable_file_names_itself(env: StackEnv, module) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="/no/such/file: No such file or directory"):
        child.call(env, module("open('/no/such/file')"), [])


@pytest.mark.parametrize("body", ["raise RuntimeError('boom')", "import os; os.abort()"])
def test_a_child_that_dies_is_one_line(env: StackEnv, module, body: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="a_child ended with exit code") as caught:
        child.call(env, module(body), [])
    assert "\n" not in caught.value.message
    if "boom" in body:
        assert "RuntimeError: boom" in caught.value.message
