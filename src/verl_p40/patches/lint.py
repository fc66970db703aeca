"""What can be wrong with a queue by itself, without the release that it patches."""

from __future__ import annotations

import ast
import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_p40.errors import TreeError
from verl_p40.patches.header import OPTIONAL, REQUIRED
from verl_p40.patches.manifest import FILE_NAME as MANIFEST
from verl_p40.patches.project import BUILD_GROUP, find_project
from verl_p40.patches.queue import SERIES, Patch, load_patch, read_series

_FORWARDED = re.compile(r"^(https?://\S+|yes\b.*|(no|not-needed)[,:] .+)", re.DOTALL)
_HUNK = re.compile(rb"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_BETWEEN_HUNKS = (b"diff --git ", b"index ", b"new file mode ", b"deleted file mode ", b"--- ")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where (a file of the queue or of the tree) and what."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def repository_of(queue: Path) -> Path | None:
    """The repository around a queue, where its tests are; None for an installed package."""
    root = queue.resolve().parent.parent
    return root if (root / "tests").is_dir() else None


def lint_queue(directory: Path, *, version: str = "", root: Path | None = None) -> list[Finding]:
    """Check a queue's files, names, order, headers and whitespace.

    Args:
        directory: the queue.
        version: the pinned release that ``Applies-To`` has to name; empty to compare only the
            patches with each other.
        root: the repository in which ``Proved-By`` has to name a test; None skips that check.

    Raises:
        TreeError: there is no series to start from.
    """
    findings: list[Finding] = []
    patches: list[Patch] = []
    entries = read_series(directory)
    for entry in entries:
        try:
            patches.append(load_patch(directory, entry))
        except TreeError as error:
            findings.append(Finding(SERIES, error.message.replace(f"{directory}/", "")))
    findings += _files(directory, entries)
    findings += _order(patches, entries)
    expected = version or next((p.header.get("Applies-To").split(" ")[-1] for p in patches), "")
    for position, patch in enumerate(patches):
        earlier = {other.name: other for other in patches[:position]}
        whats = [
            *_header(patch, f"{directory.name} {expected}", earlier),
            *_scope(patch, directory.name, earlier),
            *_proof(patch, root),
            *_text(patch),
        ]
        findings += [Finding(patch.path, what) for what in whats]
    return findings


def _files(directory: Path, entries: list[str]) -> Iterator[Finding]:
    known = {*entries, SERIES, MANIFEST, "README.md"}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in known:
            yield Finding(name, "not listed in series (list it or delete it)")
    if not (directory / MANIFEST).is_file():
        yield Finding(MANIFEST, "missing: without it no tree can be told from another")


def _order(patches: list[Patch], entries: list[str]) -> Iterator[Finding]:
    for entry in sorted({entry for entry in entries if entries.count(entry) > 1}):
        yield Finding(SERIES, f"lists {entry} more than once")
    names: dict[str, str] = {}
    numbers: dict[tuple[str, int], str] = {}
    last: dict[str, Patch] = {}
    previous = ""
    for patch in patches:
        if names.setdefault(patch.name, patch.path) != patch.path:
            yield Finding(SERIES, f"{patch.path} has the name of {names[patch.name]}")
        same = numbers.setdefault((patch.group, patch.number), patch.path)
        if same != patch.path:
            yield Finding(SERIES, f"{patch.path} has the number of {same}")
        elif patch.group in last and patch.number < last[patch.group].number:
            yield Finding(SERIES, f"{patch.path} stands after {last[patch.group].path}")
        if patch.group in last and previous != patch.group:
            yield Finding(SERIES, f"{patch.path} stands apart from its group {patch.group}")
        last[patch.group], previous = patch, patch.group


def _scope(patch: Patch, project: str, earlier: Mapping[str, Patch]) -> Iterator[str]:
    """Where the release has files beside the package, each patch is on one side of the line."""
    facts = find_project(project)
    if not facts.beside:
        return
    builds = patch.group == BUILD_GROUP
    for path in patch.touches:
        if facts.inside(path) == builds:
            yield f"{path} is {'inside' if builds else 'outside'} {project}/, so not for this group"
    for name in () if builds else patch.header.depends:
        if name in earlier and earlier[name].group == BUILD_GROUP:
            yield f"Depends names {name!r}, which an installed {project} does not have"


def _header(patch: Patch, release: str, earlier: Mapping[str, Patch]) -> Iterator[str]:
    header = patch.header
    yield from (f"header {problem}" for problem in header.problems)
    for name in REQUIRED:
        if not header.get(name):
            yield f"header has no {name}"
    for name in header.fields:
        if name not in REQUIRED + OPTIONAL:
            yield f"header has an unknown field {name}"
    if header.get("Applies-To") not in ("", release):
        yield f"Applies-To is {header.get('Applies-To')!r}, the queue is for {release!r}"
    if header.get("Forwarded") and not _FORWARDED.match(header.get("Forwarded")):
        yield "Forwarded is neither an address, 'yes', nor 'no, why' or 'not-needed, why'"
    updated = header.get("Last-Update")
    try:
        if updated and datetime.date.fromisoformat(updated).isoformat() != updated:
            raise ValueError
    except ValueError:
        yield f"Last-Update is not a date YYYY-MM-DD: {updated!r}"
    for name in header.depends:
        if name not in earlier:
            yield f"Depends names {name!r}, which is no earlier patch"


def _proof(patch: Patch, root: Path | None) -> Iterator[str]:
    node = patch.header.get("Proved-By")
    if root is None or not node:
        return
    if "\n" in node or not node.startswith("tests/"):
        yield f"Proved-By is not one pytest node id below tests/: {node!r}"
    elif not test_exists(root, node):
        yield f"Proved-By names no existing test: {node}"


def test_exists(root: Path, node: str) -> bool:
    """Whether ``path::[Class::]function[parameters]`` names a test defined in that file."""
    path, *names = re.sub(r"\[.*\]\Z", "", node, flags=re.DOTALL).split("::")
    if not names or not (root / path).is_file():
        return False
    try:
        body = ast.parse((root / path).read_bytes()).body
    except (SyntaxError, ValueError):
        return False
    for name in names[:-1]:
        body = next((s.body for s in body if isinstance(s, ast.ClassDef) and s.name == name), [])
    functions = (s for s in body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return any(function.name == names[-1] for function in functions)


test_exists.__test__ = False  # type: ignore[attr-defined]  # not a test, for pytest


def _text(patch: Patch) -> Iterator[str]:
    """Damage that editors and mailers do to patches, by line of the patch file."""
    if not patch.data.endswith(b"\n"):
        yield "does not end in a newline"
    if b"\r" in patch.header_text.encode():
        yield "header has carriage returns"
    lines = patch.data.split(b"\n")
    start = patch.header_text.count("\n")
    if lines[start : start + 1] != [b"---"]:
        yield "no line '---' between header and diff"
    old = new = 0
    for number, line in enumerate(lines[start + 1 : -1], start=start + 2):
        hunk = _HUNK.match(line)
        if old <= 0 and new <= 0:
            if hunk:
                old, new = (int(group or b"1") for group in hunk.groups())
            elif not line.startswith((*_BETWEEN_HUNKS, b"+++ ", b"\\ ")):
                yield f"line {number} belongs to no hunk: {line[:60].decode('utf-8', 'replace')!r}"
            continue
        old -= not line.startswith((b"+", b"\\"))
        new -= not line.startswith((b"-", b"\\"))
        if not line.strip(b"\r"):
            yield f"line {number} is empty: an editor removed the blank that starts it"
        elif line.startswith(b"+"):
            text = line[1:]
            if text != text.rstrip():
                yield f"line {number} adds blanks or a carriage return at the end of a line"
            if b" \t" in text[: len(text) - len(text.lstrip())]:
                yield f"line {number} adds a blank before a tab"
            if re.match(rb"(<<<<<<<|>>>>>>>) ", text):
                yield f"line {number} adds a conflict marker"
