"""A prepared folder is whole or absent, whoever else is at it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from verl_p40.data import folder
from verl_p40.errors import DataError, DiskError


def build(text: str):  # type: ignore[no-untyped-def]
    def write(fresh: Path) -> dict[str, object]:
        (fresh / "sub").mkdir()
        (fresh / "sub" / "a.txt").write_text(text)
        return {"rows": len(text)}

    return write


def make(target: Path, text: str, *, reuse: bool = True) -> tuple[folder.Record, bool]:
    recipe = {"text": text}
    return folder.make(
        target,
        "demo",
        recipe,
        build(text),
        reuse=lambda found: reuse and found.digest == folder.digest(recipe),
    )


def only(target: Path) -> list[str]:
    return sorted(p.name for p in target.parent.iterdir() if not p.name.endswith(".lock"))


def test_made_then_reused(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "demo"
    record, reused = make(target, "one")
    assert not reused and record.facts == {"rows": 3}
    before = (target / "sub/a.txt").stat().st_ino
    record, reused = make(target, "one")
    assert reused and record.facts == {"rows": 3}
    assert (target / "sub/a.txt").stat().st_ino == before
    assert only(target) == ["demo"]


def test_another_recipe_replaces_it(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    make(target, "one")
    _, reused = make(target, "two")
    assert not reused
    assert (target / "sub/a.txt").read_text() == "two"
    assert only(target) == ["demo"]


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "demo"
    make(target, "one")
    file = target / "sub/a.txt"
    if damage == "change":
        file.write_text("bad")
    else:
        file.unlink()
    _, reused = make(target, "one")
    assert not reused
    assert file.read_text() == "one"


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="was not made by") as caught:
        make(target, "one")
    assert "--out" in caught.value.fix
    assert (target / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    make(tmp_path / "demo", "one")
    assert (tmp_path / "demo/sub/a.txt").read_text() == "one"


def test_a_failed_build_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    make(target, "one")

    def fail(fresh: Path) -> dict[str, object]:
        (fresh / "half").write_text("x")
        raise DataError("row 7 is bad")

    with pytest.raises(DataError, match="row 7"):
        folder.make(target, "demo", {}, fail, reuse=lambda _: False)
    assert (target / "sub/a.txt").read_text() == "one"
    assert only(target) == ["demo"]


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    def full(fresh: Path) -> dict[str, object]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskError, match="is full"):
        folder.make(tmp_path / "demo", "demo", {}, full, reuse=lambda _: True)
    assert only(tmp_path / "demo") == []


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot make the folder"):
        make(tmp_path / "file" / "demo", "one")


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".demo.new").mkdir()
    (tmp_path / ".demo.new" / "half").write_text("x")
    make(tmp_path / "demo", "one")
    assert not (tmp_path / "demo/half").exists()
    assert only(tmp_path / "demo") == ["demo"]


def _slow(target: Path, log: Path) -> None:
    def write(fresh: Path) -> dict[str, object]:
        with log.open("a") as out:
            out.write("built\n")
        time.sleep(0.5)
        (fresh / "a.txt").write_text("x")
        return {}

    folder.make(target, "demo", {}, write, reuse=lambda _: True)


def test_two_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    both = [context.Process(target=_slow, args=(tmp_path / "demo", log)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(20)
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "built\n"
    assert (tmp_path / "demo/a.txt").read_text() == "x"
