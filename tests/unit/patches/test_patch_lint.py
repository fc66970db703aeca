"""Each rule of the lint, broken one at a time in a queue that is clean otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from patchkit import REPOSITORY, QueueMaker

from verl_p40.errors import TreeError
from verl_p40.patches.header import parse_header
from verl_p40.patches.lint import lint_queue, repository_of, test_exists
from verl_p40.patches.queue import load_queue

FIRST = "fix/0001-score.patch"
LAST = "p40/0202-less.patch"


@pytest.fixture
def root(maker: QueueMaker) -> Path:
    """The repository of the queue, with the test that its headers name."""
    root = maker.directory.parent.parent
    (root / "tests").mkdir()
    (root / "tests" / "test_proof.py").write_text(
        "def test_gsm8k(): ...\nclass TestA:\n    class TestB:\n        async def test_c(self): ...\n"
        "x = lambda: 1\ndef outer():\n    def test_inner(): ...\n"
    )
    return root


def edit(path: Path, old: str, new: str, count: int = 1) -> None:
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode(), count))


def test_a_clean_queue_has_no_findings(maker: QueueMaker, root: Path) -> None:
    assert lint_queue(maker.directory, version="0.4.1", root=root) == []


def test_the_real_queue_is_clean() -> None:
    directory = REPOSITORY / "patches" / "verl"
    root = repository_of(directory)
    assert root == REPOSITORY
    assert [str(item) for item in lint_queue(directory, version="0.4.1", root=root)] == []


def first(old: str, new: str) -> Callable[[Path], None]:
    return lambda queue: edit(queue / FIRST, old, new)


def series(old: str, new: str) -> Callable[[Path], None]:
    return lambda queue: edit(queue / "series", old, new)


def rename(old: str, new: str) -> Callable[[Path], None]:
    def do(queue: Path) -> None:
        (queue / new).parent.mkdir(exist_ok=True)
        (queue / old).rename(queue / new)
        edit(queue / "series", old, new)

    return do


def unlisted(queue: Path) -> None:
    (queue / "fix" / "0009-old.patch.orig").write_text("x")


@pytest.mark.parametrize(
    ("break_it", "where", "what"),
    [
        (unlisted, "fix/0009-old.patch.orig", "not listed"),
        (lambda queue: (queue / "upstream.sha256").unlink(), "upstream.sha256", "missing"),
        (lambda queue: (queue / LAST).unlink(), "series", "0202-less.patch: listed in series"),
        (series(f"{LAST}\n", f"{LAST}\n{LAST}\n"), "series", "lists .* more than once"),
        (series(LAST, "p40/202-less.patch"), "series", "is not GROUP/NNNN-name.patch"),
        (rename(LAST, "p40/0201-less.patch"), "series", "has the number of p40/0201-more"),
        (rename(LAST, "p40/0150-less.patch"), "series", "stands after p40/0201-more"),
        (rename(LAST, "fix/0003-less.patch"), "series", "stands apart from its group fix"),
        (rename(LAST, "p40/0202-score.patch"), "series", "has the name of fix/0001-score"),
        (first("Author: somebody\n", ""), FIRST, "no Author"),
        (first("Prevents: SomeError: some message", "Prevents:"), FIRST, "no Prevents"),
        (first("Author: somebody", "Auther: somebody"), FIRST, "unknown field Auther"),
        (first("Author: somebody\n", "Author: a\nAuthor: b\n"), FIRST, "Author appears twice"),
        (first("Author: somebody\n", "\nAuthor: a\n"), FIRST, "line 5 is empty"),
        (first("Author: somebody\n", "Author: a \n"), FIRST, "line 5 ends in blanks"),
        (first("Author: somebody\n", "Author: a\nprose\n"), FIRST, "neither 'Field: value'"),
        (first("verl 0.4.1", "verl 0.5.0"), FIRST, "the queue is for 'verl 0.4.1'"),
        (first("no, only a test", "no"), FIRST, "Forwarded is neither"),
        (first("2026-01-31", "2026-02-31"), FIRST, "not a date"),
        (first("2026-01-31", "31 January"), FIRST, "not a date"),
        (first("---\n", "Depends: less\n---\n"), FIRST, "no earlier patch"),
        (first("tests/test_proof.py::test_gsm8k", "tests/test_proof.py"), FIRST, "no existing test"),
        (first("::test_gsm8k", "::test_other"), FIRST, "no existing test"),
        (first("tests/test_proof.py::test_gsm8k", "see the docs"), FIRST, "not one pytest node"),
        (first("\n---\n", "\n"), FIRST, "no line '---'"),
        (first("+HOW = 1", "+HOW = 1 "), FIRST, "adds blanks"),
        (first("+HOW = 1", "+HOW = 1\r"), FIRST, "carriage return"),
        (first("+HOW = 1", "+ \tHOW = 1"), FIRST, "blank before a tab"),
        (first("+HOW = 1", "+<<<<<<< HEAD"), FIRST, "conflict marker"),
        (first("\n \n", "\n\n"), FIRST, "editor removed the blank"),
        (lambda queue: edit(queue / "fix/0002-new-file.patch", "+VALUE = 1\n", "+VALUE = 1\n-- \n2.39\n"),
         "fix/0002-new-file.patch", "belongs to no hunk: '-- '"),
    ],
)  # fmt: skip
def test_each_rule(
    break_it: Callable[[Path], None], where: str, what: str, maker: QueueMaker, root: Path
) -> None:
    break_it(maker.directory)
    findings = lint_queue(maker.directory, version="0.4.1", root=root)
    assert [item for item in findings if item.where == where and re.search(what, item.what)], [
        str(item) for item in findings
    ]


def test_versions_are_compared_with_each_other_where_none_is_pinned(maker: QueueMaker) -> None:
    edit(maker.directory / LAST, "verl 0.4.1", "verl 0.4.2")
    (finding,) = lint_queue(maker.directory)
    assert (finding.where, "0.4.2" in finding.what) == (LAST, True)


def test_which_node_ids_name_a_test(root: Path) -> None:
    path = "tests/test_proof.py"
    for node in ("test_gsm8k", "test_gsm8k[a::b-1]", "TestA::TestB::test_c"):
        assert test_exists(root, f"{path}::{node}"), node
    for node in ("test_c", "TestA::test_c", "test_inner", "x", "TestA"):
        assert not test_exists(root, f"{path}::{node}"), node
    assert not test_exists(root, "tests/none.py::test_gsm8k")


def test_header_fields_continue_on_indented_lines() -> None:
    header = parse_header("Description: One\n two\n .\n  three\nDepends: p40/0001-a.patch, b\n")
    assert header.fields["Description"] == "One\ntwo\n\n three"
    assert header.summary == "One"
    assert header.depends == ("a", "b")
    assert header.problems == ()


def test_no_queue_at_all(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="not a patch queue") as caught:
        load_queue(tmp_path)
    assert "--queue" in caught.value.fix


def test_the_digest_follows_content_and_order_alone(maker: QueueMaker) -> None:
    digest = maker.load().digest
    edit(maker.directory / "series", "fix/0001", "# a comment\n\nfix/0001")
    assert maker.load().digest == digest
    text = (maker.directory / "series").read_text().splitlines()
    (maker.directory / "series").write_text("\n".join(reversed(text)))
    assert maker.load().digest != digest
    (maker.directory / "series").write_text("\n".join(text))
    edit(maker.directory / FIRST, "somebody", "somebody else")
    assert maker.load().digest != digest
