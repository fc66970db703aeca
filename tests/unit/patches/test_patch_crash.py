"""Killed (SIGKILL) at every single point at which apply or revert changes the file system."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patchkit import GSM8K, QueueMaker, contents, entries, substitute

from verl_p40.patches import swap
from verl_p40.patches.queue import Queue
from verl_p40.patches.swap import previous_folder
from verl_p40.patches.tree import apply_queue, revert, tree_state

_CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.symlink",
    "os.link",
}
"""Audit events of what changes names or contents; opening a file for writing is one too."""


def killed_at(point: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that dies just before its ``point``-th change; False if it ended."""
    child = os.fork()
    if child == 0:  # nothing below may return into pytest
        try:
            _die_at(point)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _die_at(point: int) -> None:
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[object, ...]) -> None:
        writes = (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if event in _CHANGES or writes:
            tick()

    real = swap.exchange

    def exchange(one: Path, other: Path) -> bool:
        tick()  # a system call without an audit event: die before and after it
        done = real(one, other)
        tick()
        return done

    swap.exchange = exchange
    sys.addaudithook(hook)


def every_point(tree: Path, work: Callable[[], object], check: Callable[[int], None]) -> int:
    """Kill ``work`` at each point of a fresh copy of ``tree``; returns how many there are."""
    original = tree.with_name("original")
    shutil.copytree(tree, original)
    point = 0
    while True:
        point += 1
        assert point < 2000, "the work never ends"
        if not killed_at(point, work):
            return point - 1
        check(point)
        shutil.rmtree(tree)
        shutil.copytree(original, tree)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; waiting for the disk a thousand times."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(swap, "exchange", lambda one, other: False)
    return str(request.param)


@pytest.fixture
def other(small: Path, tmp_path: Path) -> Queue:
    """An older queue, which the tests replace or are replaced by."""
    maker = QueueMaker(small, tmp_path / "other")
    maker.add("fix/0001-else.patch", {GSM8K: substitute(b"import re\n", b"import re as re\n")})
    return maker.load()


@pytest.mark.parametrize("start", ["released", "patched"])
def test_apply_killed_anywhere(
    start: str, way: str, small: Path, maker: QueueMaker, other: Queue
) -> None:
    queue = maker.load()
    if start == "patched":
        apply_queue(small, other)
    old, new = contents(small), contents(maker.result)
    seen = {"old": 0, "new": 0, "aside": 0}

    def check(point: int) -> None:
        if not (small / "verl").exists():
            assert way == "two renames", "with an exchange the package is always there"
            assert contents_of_moved(small) == old
            state = tree_state(small, queue)
            assert (state.kind, state.repairable) == ("missing", True)
            seen["aside"] += 1
            aside = True
        else:
            now = contents(small)
            assert now in (old, new), f"torn at point {point}"
            seen["new" if now == new else "old"] += 1
            aside = False
        report = apply_queue(small, queue)
        assert contents(small) == new
        assert entries(small) == ["verl"], f"left behind at point {point}"
        assert report.recovered is aside
        assert tree_state(small, queue).kind == "patched"

    points = every_point(small, lambda: apply_queue(small, queue), check)
    assert points > 30
    assert seen["old"] > 10
    assert seen["new"] >= 1
    assert seen["aside"] == (1 if way == "two renames" else 0)


def contents_of_moved(tree: Path) -> dict[str, bytes]:
    aside = tree / "moved"
    shutil.copytree(previous_folder(tree / "verl"), aside / "verl")
    result = contents(aside)
    shutil.rmtree(aside)
    return result


def test_revert_killed_anywhere(way: str, small: Path, maker: QueueMaker) -> None:
    released = contents(small)
    apply_queue(small, maker.load())
    patched = contents(small)

    def check(point: int) -> None:
        if (small / "verl").exists():
            assert contents(small) in (patched, released), f"torn at point {point}"
        revert(small)
        assert contents(small) == released
        assert entries(small) == ["verl"]

    assert every_point(small, lambda: revert(small), check) > 30
