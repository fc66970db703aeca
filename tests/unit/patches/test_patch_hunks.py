"""Parsing and applying diffs: every expectation comes from git, which made the diff."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from patchkit import git_diff

from verl_p40.patches.hunks import Fit, apply_hunks, combine, parse_diff, split_lines

SOURCE = b"".join(b"line %d\n" % number for number in range(1, 41))


def diff_of(before: bytes, after: bytes, tmp_path: Path) -> bytes:
    for folder, content in (("old", before), ("new", after)):
        file = tmp_path / folder / "verl" / "x.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return git_diff(tmp_path / "old", tmp_path / "new")


def patched(before: bytes, diff: bytes) -> tuple[bytes, list[Fit]]:
    (file,) = parse_diff(diff, "verl")
    lines, fits = apply_hunks(split_lines(before), file.hunks)
    return b"".join(lines), [hunk.fit for hunk in fits]


@pytest.mark.parametrize("seed", range(40))
def test_random_edits_come_out_byte_for_byte(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    words = [
        b"",
        b"a",
        b"b",
        b"  c",
        b"\td",
        b"- e",
        b"-- f",
        b"++ g",
        b"\\ h",
        b"\xe9\xff",
        b"\x0c\r",
    ]
    ends = [b"\n", b"\n", b"\n", b"\r\n"]
    lines = [chance.choice(words) + chance.choice(ends) for _ in range(chance.randrange(1, 60))]
    after = list(lines)
    for _ in range(chance.randrange(1, 8)):
        place = chance.randrange(len(after) + 1)
        after[place : place + chance.randrange(3)] = [
            chance.choice(words) + chance.choice(ends) for _ in range(chance.randrange(3))
        ]
    old, new = b"".join(lines), b"".join(after)
    if chance.random() < 0.5:
        old = old.rstrip(b"\r\n") + b"x"
    if chance.random() < 0.5:
        new = new.rstrip(b"\r\n") + b"x"
    if old == new or not old or not new:
        new = old + b"more\n"
    result, fits = patched(old, diff_of(old, new, tmp_path))
    assert result == new
    assert set(fits) == {Fit.EXACT}


def test_hunks_shifted_by_other_changes(tmp_path: Path) -> None:
    after = SOURCE.replace(b"line 10\n", b"ten\n").replace(b"line 30\n", b"thirty\n")
    diff = diff_of(SOURCE, after, tmp_path)
    (file,) = parse_diff(diff, "verl")
    lines, fits = apply_hunks(split_lines(b"new\nnew\n" + SOURCE), file.hunks)
    assert b"".join(lines) == b"new\nnew\n" + after
    assert [(hunk.fit, hunk.offset) for hunk in fits] == [(Fit.OFFSET, 2), (Fit.OFFSET, 2)]


def test_shift_follows_the_hunk_before_when_the_text_repeats(tmp_path: Path) -> None:
    block = b"a\nb\nc\nd\ne\nf\ng\n"
    source = SOURCE + block * 4
    after = source.replace(b"line 30\n", b"thirty\n")
    at = len(SOURCE) + len(block)  # the second of the four
    after = after[: at - 1] + after[at - 1 :].replace(b"d\n", b"D\n", 1)
    diff = diff_of(source, after, tmp_path)
    result, fits = patched(b"x\n" * 7 + source, diff)
    assert result == b"x\n" * 7 + after
    assert fits == [Fit.OFFSET, Fit.OFFSET]


def test_changed_context_needs_fuzz(tmp_path: Path) -> None:
    after = SOURCE.replace(b"line 10\n", b"ten\n")
    diff = diff_of(SOURCE, after, tmp_path)
    (file,) = parse_diff(diff, "verl")
    for line, fuzz in ((b"line 7\n", 1), (b"line 12\n", 2)):
        changed = SOURCE.replace(line, b"other\n")
        lines, fits = apply_hunks(split_lines(changed), file.hunks)
        assert b"".join(lines) == changed.replace(b"line 10\n", b"ten\n")
        assert [(hunk.fit, hunk.fuzz) for hunk in fits] == [(Fit.FUZZ, fuzz)]


def test_changed_neighbour_is_a_conflict_and_leaves_the_rest_applied(tmp_path: Path) -> None:
    after = SOURCE.replace(b"line 10\n", b"ten\n").replace(b"line 30\n", b"thirty\n")
    diff = diff_of(SOURCE, after, tmp_path)
    result, fits = patched(SOURCE.replace(b"line 11\n", b"other\n"), diff)
    assert fits == [Fit.CONFLICT, Fit.EXACT]
    assert b"thirty\n" in result
    assert b"line 10\n" in result


@pytest.mark.parametrize("change", [b"ten\n", b"line 10\nand more\n", b""])
def test_what_upstream_has_already_is_told_and_not_applied_twice(
    change: bytes, tmp_path: Path
) -> None:
    after = SOURCE.replace(b"line 10\n", change)
    diff = diff_of(SOURCE, after, tmp_path)
    result, fits = patched(after, diff)
    assert fits == [Fit.UPSTREAM]
    assert result == after


def test_empty_files_come_go_and_fill(tmp_path: Path) -> None:
    assert patched(b"", diff_of(b"", b"text\n", tmp_path)) == (b"text\n", [Fit.EXACT])
    diff = diff_of(b"", b"text\n", tmp_path)
    assert patched(b"other\n", diff)[1] == [Fit.CONFLICT]
    assert patched(b"text\n", diff_of(b"text\n", b"", tmp_path)) == (b"", [Fit.EXACT])


def test_verdict_on_a_whole() -> None:
    assert combine([]) is Fit.EXACT
    assert combine([Fit.UPSTREAM, Fit.UPSTREAM]) is Fit.UPSTREAM
    assert combine([Fit.UPSTREAM, Fit.EXACT]) is Fit.PARTLY
    assert combine([Fit.UPSTREAM, Fit.FUZZ, Fit.EXACT]) is Fit.FUZZ


HUNK = "@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("diff", "words"),
    [
        ("", "no diff found"),
        (f"--- a/verl/x.py\n+++ b/verl/x.py\n{HUNK.replace('-1', '-1,2')}", "malformed"),
        (f"--- a/torch/x.py\n+++ b/torch/x.py\n{HUNK}", "outside verl/"),
        (f"--- a/verl/../x.py\n+++ b/verl/../x.py\n{HUNK}", "not a path below"),
        (f"--- /verl/x.py\n+++ /verl/x.py\n{HUNK}", "not a path below"),
        (f"--- a/verl/x.py\n+++ b/verl/y.py\n{HUNK}", "renames"),
        (f"--- a/verl/x.py\n+++ b/verl/x.py\n{HUNK}" * 2, "appears twice"),
        ("--- a/verl/x.py\n+++ b/verl/x.py\n@@ -1 +1 @@\n a\n", "changes nothing"),
        (
            f"diff --git a/verl/x b/verl/x\nold mode 100644\nnew mode 100755\n"
            f"--- a/verl/x\n+++ b/verl/x\n{HUNK}",
            "mode changes",
        ),
        (
            "diff --git a/verl/x b/verl/x\nnew file mode 120000\n"
            "--- /dev/null\n+++ b/verl/x\n@@ -0,0 +1 @@\n+b\n",
            "only plain files",
        ),
        (
            "diff --git a/verl/x b/verl/x\nindex 1..2\nBinary files a/verl/x and b/verl/x differ\n",
            "binary",
        ),
    ],
)
def test_what_is_no_patch_of_ours_is_refused(diff: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_diff(diff.encode(), "verl")
