"""Writing a git history back as a patch queue: the way back from gittree.py."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_p40.errors import TreeError, UsageError
from verl_p40.patches.gittree import BASE_TAG, NEXT_TAG, TRAILER, Git, put
from verl_p40.patches.header import parse_header
from verl_p40.patches.hunks import Fit
from verl_p40.patches.manifest import FILE_NAME as MANIFEST
from verl_p40.patches.manifest import format_manifest, sha256
from verl_p40.patches.project import find_project
from verl_p40.patches.queue import PATCH_PATH, SERIES, load_queue, plan_patches
from verl_p40.patches.swap import exclusive, next_folder, swap_in

_DIFF = (
    "-c", "diff.algorithm=myers", "-c", "diff.indentHeuristic=true", "-c", "core.quotePath=false",
    "-c", "diff.suppressBlankEmpty=false", "-c", "diff.orderFile=", "-c", "core.attributesFile=",
    "diff-tree", "-r", "-p", "--root", "--no-commit-id", "--no-renames", "--no-color",
    "--no-ext-diff", "--no-textconv", "--unified=3", "--inter-hunk-context=0", "--text",
    "--src-prefix=a/", "--dst-prefix=b/", "--no-relative",
)  # fmt: skip


@dataclass(frozen=True)
class RefreshReport:
    """What :func:`refresh_queue` wrote."""

    base: str
    patches: tuple[str, ...]
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass
class _Commit:
    sha: str
    group: str
    number: int | None
    name: str
    header: str
    diff: bytes
    number_out: int = 0

    @property
    def path(self) -> str:
        return f"{self.group}/{self.number_out:04d}-{self.name}.patch"


def refresh_queue(directory: Path, folder: Path, base: str | None = None) -> RefreshReport:
    """Write the commits of a git tree as the queue in ``directory``, all of it or nothing.

    Args:
        directory: the queue to replace; its last name is the package.
        folder: the repository, clean, with the patches checked out.
        base: the commit of the release. Default: ``upstream-next`` or ``upstream``, whichever is
            the first ancestor of HEAD, else the first commit.

    Raises:
        UsageError: uncommitted changes, a merge, or a commit without a name of the form
            ``Patch-Name: group/NNNN-name.patch`` (or a subject ``group: some words``).
        TreeError: a commit that is no patch we can apply, or git failed.
    """
    git = Git(folder)
    if not (folder / ".git").exists():
        raise UsageError(f"{folder}: not a git work tree", fix="make one: patches unpack DIR")
    rebasing = [n for n in ("rebase-merge", "rebase-apply") if (folder / ".git" / n).exists()]
    if rebasing or git.text("status", "--porcelain"):
        raise UsageError(
            f"{folder}: uncommitted changes or a rebase under way", fix="commit, or end the rebase"
        )
    start = _base(git, base)
    commits = [_read_commit(git, sha) for sha in _commits(git, start)]
    directory = directory.resolve()
    old = _old_files(directory)
    _number(commits, old)
    released = _archive(git, start, find_project(directory.name).roots)
    new = {commit.path: _patch_file(commit) for commit in commits}
    for position, commit in enumerate(commits):
        if any(commit.name == other.name for other in commits[:position]):
            raise UsageError(
                f"{folder}: commit {commit.sha[:12]} is called {commit.name} as one before it",
                fix=f"change its line '{TRAILER}: ...'",
            )
    new[SERIES] = _series(old.get(SERIES, b"").decode("utf-8"), commits).encode()
    new[MANIFEST] = format_manifest({n: sha256(data) for n, data in released.items()}).encode()
    kept = {n: d for n, d in old.items() if "/" not in n and n not in new}
    with exclusive(directory):
        staging = next_folder(directory)
        for name, content in (kept | new).items():
            put(staging / name, content)
        _check(staging, directory.name, git, released)
        swap_in(directory)
    patches = tuple(commit.path for commit in commits)
    was = {name for name in old if "/" in name}
    return RefreshReport(
        base=git.text("log", "-1", "--format=%h %s", start),
        patches=patches,
        added=tuple(sorted(set(patches) - was)),
        changed=tuple(sorted(n for n in was.intersection(patches) if old[n] != new[n])),
        removed=tuple(sorted(was.difference(patches))),
    )


def _base(git: Git, base: str | None) -> str:
    for name in [base] if base else [NEXT_TAG, BASE_TAG]:
        sha = git.text("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
        if base and not sha:
            raise UsageError(f"{git.folder}: no commit is called {base!r}")
        if sha and git.text("merge-base", sha, "HEAD", check=False) == sha:
            return sha
    if base:
        raise UsageError(f"{git.folder}: {base} is no ancestor of what is checked out")
    return git.text("rev-list", "--max-parents=0", "HEAD").splitlines()[-1]


def _commits(git: Git, start: str) -> list[str]:
    merges = git.text("rev-list", "--merges", f"{start}..HEAD").splitlines()
    if merges:
        raise UsageError(
            f"{git.folder}: {merges[0][:12]} is a merge; a queue is a line of commits",
            fix="git rebase",
        )
    shas = git.text("rev-list", "--reverse", f"{start}..HEAD").splitlines()
    if not shas:
        raise UsageError(f"{git.folder}: no commit after the release {start[:12]}")
    return shas


def _read_commit(git: Git, sha: str) -> _Commit:
    message = git.run("log", "-1", "--format=%B", sha).decode("utf-8", "replace")
    diff = _without_noise(git.run(*_DIFF, sha))
    lines = message.rstrip("\n").split("\n")
    trailers = [line for line in lines if line.startswith(f"{TRAILER}:")]
    header = "\n".join(line for line in lines if line not in trailers).rstrip("\n") + "\n"
    parsed = parse_header(header)
    if not parsed.get("Description"):
        header = _header_of_prose(header)
    if parsed.depends:  # paths would be wrong after a renumbering
        needed = f"Depends: {', '.join(parsed.depends)}"
        header = re.sub(r"^Depends:.*(\n .*)*", needed, header, flags=re.MULTILINE)
    if not diff:
        raise UsageError(
            f"{git.folder}: commit {sha[:12]} ({lines[0][:60]}) changes nothing",
            fix="drop it: git rebase -i",
        )
    group, number, name = _name(git, sha, trailers, lines[0])
    return _Commit(sha, group, number, name, header, diff)


def _name(git: Git, sha: str, trailers: list[str], subject: str) -> tuple[str, int | None, str]:
    if trailers:
        named = trailers[-1].partition(":")[2].strip()
        full = named if named.endswith(".patch") else f"{named}.patch"
        match = PATCH_PATH.match(full)
        if match:
            return match["group"], int(match["number"]), match["name"]
        match = PATCH_PATH.match(full.replace("/", "/0000-", 1))
        if match:
            return match["group"], None, match["name"]
    match = re.match(r"^(?:Description: )?([a-z][a-z0-9-]*): +(.+)$", subject)
    slug = re.sub(r"[^a-z0-9]+", "-", match[2].lower()).strip("-")[:50].strip("-") if match else ""
    if match is None or not slug or trailers:
        raise UsageError(
            f"{git.folder}: commit {sha[:12]} ({subject[:60]}) does not say its file name",
            fix=f"end its message with a line '{TRAILER}: group/some-name'",
        )
    return match[1], None, slug


def _header_of_prose(message: str) -> str:
    """A header from an ordinary commit message; lint then asks for the other fields."""
    subject, _, body = message.rstrip("\n").partition("\n")
    subject = re.sub(r"^[a-z][a-z0-9-]*: +", "", subject)
    lines = [f" {line.rstrip()}" if line.strip() else " ." for line in body.strip().split("\n")]
    return "\n".join([f"Description: {subject}", *(lines if body.strip() else [])]) + "\n"


def _without_noise(diff: bytes) -> bytes:
    """Drop what says nothing here and changes with every rebase: git's own header lines.

    A patch with a file that has no hunks (empty, added or deleted) or another mode keeps them,
    less the hashes of blobs: it cannot be told without them.
    """
    files = [text for text in re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE) if text]
    starts = [re.search(rb"^--- ", text, re.MULTILINE) for text in files]
    heads = [text[: at.start()] if at else text for text, at in zip(files, starts, strict=True)]
    special = re.compile(rb"^(?:old mode|new file mode (?!100644$))", re.MULTILINE)
    if all(starts) and not any(special.search(head) for head in heads):
        return b"".join(text[len(head) :] for text, head in zip(files, heads, strict=True))
    clean = [re.sub(rb"^index [^\n]*\n", b"", head, flags=re.MULTILINE) for head in heads]
    return b"".join(
        new + text[len(head) :] for text, head, new in zip(files, heads, clean, strict=True)
    )


def _number(commits: Sequence[_Commit], old: dict[str, bytes]) -> None:
    """Keep the numbers where they ascend within a group, else count anew from its first one."""
    groups = [commit.group for commit in commits]
    for position, group in enumerate(groups[1:], start=1):
        if group != groups[position - 1] and group in groups[: position - 1]:
            name = f"{commits[position].sha[:12]} ({group}/{commits[position].name})"
            raise UsageError(
                f"commit {name} stands apart from its group {group}",
                fix="move it: git rebase -i",
            )
    for group in dict.fromkeys(groups):
        members = [commit for commit in commits if commit.group == group]
        numbers = [commit.number or 0 for commit in members]
        if 0 in numbers or sorted(set(numbers)) != numbers:
            known = [
                int(m["number"]) for m in map(PATCH_PATH.match, old) if m and m["group"] == group
            ]
            first = min([*known, *(n for n in numbers if n)], default=1)
            numbers = list(range(first, first + len(members)))
        for commit, number in zip(members, numbers, strict=True):
            commit.number_out = number


def _patch_file(commit: _Commit) -> bytes:
    return commit.header.encode() + b"---\n" + commit.diff


def _series(old: str, commits: Sequence[_Commit]) -> str:
    """The series file; comments stay above the patch, or at the top, where they stood."""
    if [line.partition("#")[0].strip() for line in old.splitlines() if _entry(line)] == [
        commit.path for commit in commits
    ]:
        return old
    above: dict[str, list[str]] = {}
    pending: list[str] = []
    top: list[str] | None = None
    for line in old.splitlines():
        entry = _entry(line)
        if entry:
            match = PATCH_PATH.match(entry)
            above[match["name"] if match else entry] = pending
            pending = []
        elif line.strip():
            pending.append(line)
        elif pending and top is None and not above:
            top, pending = pending, []
    lines = top or []
    group = ""
    for commit in commits:
        if commit.group != group and lines:
            lines = [*lines, ""]
        group = commit.group
        lines = [*lines, *above.get(commit.name, []), commit.path]
    return "\n".join(lines) + "\n"


def _entry(line: str) -> str:
    return line.partition("#")[0].strip()


def _old_files(directory: Path) -> dict[str, bytes]:
    if not directory.is_dir():
        return {}
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def _archive(git: Git, commit: str, roots: Sequence[str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(git.run("archive", "--format=tar", commit))) as archive:
        for member in archive:
            source = archive.extractfile(member) if member.isfile() else None
            if source is not None and member.name.partition("/")[0] in roots:
                files[member.name] = source.read()
    return files


def _check(staging: Path, project: str, git: Git, released: dict[str, bytes]) -> None:
    """The new queue has to give exactly what is checked out."""
    with_name = staging.parent / f"{staging.name}-check" / project
    try:
        shutil.copytree(staging, with_name)
        queue = load_queue(with_name)
        plan = plan_patches(released.get, queue.patches).require(Fit.EXACT)
    except TreeError as error:
        raise TreeError(error.message.replace(f"{with_name}/", ""), fix=error.fix) from None
    finally:
        shutil.rmtree(with_name.parent, ignore_errors=True)
    wanted = _archive(git, "HEAD", find_project(project).roots)
    result = {n: d for n, d in (released | plan.after).items() if d is not None}
    for name in sorted({*wanted, *result}):
        if wanted.get(name) != result.get(name):
            raise TreeError(f"the exported queue does not give {name} as checked out")
