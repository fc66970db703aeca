"""A patch queue: the ``series`` file, the patches it lists and the manifest they apply to.

Layout, as in ``patches/verl``::

    series                          one path a line, in the order of application; # comments
    upstream.sha256                 manifest of the pinned release
    <group>/NNNN-<name>.patch       header (see header.py), a line ---, a unified diff

The name without number is what people and ``Depends:`` use, so that renumbering breaks nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from verl_p40.errors import TreeError, UsageError
from verl_p40.patches.header import Header, parse_header
from verl_p40.patches.hunks import (
    FileFit,
    FilePatch,
    Fit,
    HunkFit,
    apply_hunks,
    combine,
    parse_diff,
    split_lines,
)
from verl_p40.patches.manifest import FILE_NAME as MANIFEST
from verl_p40.patches.manifest import load_manifest
from verl_p40.patches.project import BUILD_GROUP, Project, find_project
from verl_p40.stack import paths

SERIES = "series"
PATCH_PATH = re.compile(
    r"^(?P<group>[a-z][a-z0-9-]*)/(?P<number>\d{4})-(?P<name>[a-z0-9][a-z0-9.-]*)\.patch$"
)

Reader = Callable[[str], "bytes | None"]
"""Gives the content of a file of the tree by its path, None if there is no such file."""


@dataclass(frozen=True)
class Patch:
    """One file of the queue, parsed."""

    path: str
    """Relative to the queue, e.g. ``fix/0001-sharding-manager-timing.patch``."""
    group: str
    number: int
    name: str
    header: Header
    header_text: str
    """The header as written, with a newline at its end and without the line ``---``."""
    files: tuple[FilePatch, ...]
    data: bytes

    @property
    def touches(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)


@dataclass(frozen=True)
class Selection:
    """Patches chosen from a queue, in order, and those left out as asked or as a consequence."""

    patches: tuple[Patch, ...]
    left_out: tuple[Patch, ...]


@dataclass(frozen=True)
class Queue:
    """A loaded queue. ``project`` is the folder's name and the name of the package it patches."""

    directory: Path
    project: str
    patches: tuple[Patch, ...]
    whole: Queue | None = None
    """The queue that this one is the part of which fits an installed tree; see :meth:`fitting`."""

    @cached_property
    def manifest(self) -> dict[str, str]:
        """Path -> sha256 of the pinned release. Raises TreeError if there is none."""
        if self.whole is not None:
            return {k: v for k, v in self.whole.manifest.items() if self.facts.inside(k)}
        return load_manifest(self.directory / MANIFEST)

    @property
    def facts(self) -> Project:
        """What is known about the project beyond its name."""
        return find_project(self.project)

    def fitting(self, tree: Path) -> Queue:
        """The part of the queue that ``tree`` can take: all of it, or, where an installed package
        lacks the sources beside it, all but the group ``build``.
        """
        if not self.facts.beside or self.facts.is_source(tree) or self.whole is not None:
            return self
        inside = tuple(patch for patch in self.patches if patch.group != BUILD_GROUP)
        return replace(self, patches=inside, whole=self)

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups in the order of the series."""
        return tuple(dict.fromkeys(patch.group for patch in self.patches))

    @property
    def version(self) -> str:
        """The release that the patches say they apply to (``Applies-To: verl 0.4.1`` -> 0.4.1)."""
        for patch in self.patches:
            words = patch.header.get("Applies-To").split()
            if len(words) == 2 and words[0] == self.project:
                return words[1]
        return ""

    @cached_property
    def digest(self) -> str:
        """sha256 over the series and the content of every patch of the whole queue, in hex."""
        if self.whole is not None:
            return self.whole.digest
        total = hashlib.sha256()
        for patch in self.patches:
            total.update(f"{patch.path}\0{hashlib.sha256(patch.data).hexdigest()}\n".encode())
        return total.hexdigest()

    def find(self, name: str) -> Patch:
        """The patch of that name; ``0001-name``, ``group/name`` and the file path work too.

        Raises:
            UsageError: no patch is called so.
        """
        wanted = name.removesuffix(".patch")
        for patch in self.patches:
            path = patch.path.removesuffix(".patch")
            stem = path.rpartition("/")[2]
            if wanted in (patch.name, stem, path, f"{patch.group}/{patch.name}"):
                return patch
        raise UsageError(
            f"no patch is called {name!r} in {self.directory}",
            fix="verl-p40 patches list shows the names",
        )

    def dependants(self, name: str) -> tuple[Patch, ...]:
        """Patches that need ``name`` by their ``Depends:`` field, directly or not, in order."""
        gone = {name}
        for patch in self.patches:  # a patch depends on earlier ones alone
            if gone.intersection(patch.header.depends):
                gone.add(patch.name)
        return tuple(patch for patch in self.patches if patch.name in gone - {name})

    def select(self, groups: Iterable[str] | None = None, without: Iterable[str] = ()) -> Selection:
        """Choose whole groups (None: all), less the named patches and what depends on them.

        Raises:
            UsageError: an unknown group or patch, or a chosen patch that depends on one in a
                group that was not chosen.
        """
        wanted = set(self.groups if groups is None else groups)
        unknown = sorted(wanted.difference(self.groups))
        if unknown:
            raise UsageError(
                f"no group {unknown[0]!r} in {self.directory}",
                fix=f"the groups are: {', '.join(self.groups)}",
            )
        out: set[str] = set()
        for name in without:
            patch = self.find(name)
            out |= {patch.name, *(item.name for item in self.dependants(patch.name))}
        chosen = tuple(p for p in self.patches if p.group in wanted and p.name not in out)
        names = {patch.name for patch in chosen}
        for patch in chosen:
            for needed in patch.header.depends:
                if needed not in names:
                    raise UsageError(
                        f"{patch.path} depends on {needed}, which is not selected",
                        fix=f"add its group, or --without {patch.name}",
                    )
        return Selection(chosen, tuple(p for p in self.patches if p.name in out))


def default_directory(project: str = "verl") -> Path:
    """Where the queue of ``project`` is: the repository's ``patches`` or the wheel's copy."""
    return paths.patches_dir() / project


def read_series(directory: Path) -> list[str]:
    """The entries of ``series``, comments and empty lines left out.

    Raises:
        TreeError: there is no such file.
    """
    try:
        text = (directory / SERIES).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TreeError(
            f"{directory}: not a patch queue, cannot read its series file ({error})",
            fix="name the folder with --queue, or reinstall verl-p40",
        ) from None
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def load_patch(directory: Path, entry: str) -> Patch:
    """Read one patch of a queue.

    Args:
        directory: the queue; the name of its folder is the project that may be patched.
        entry: a line of the series.

    Raises:
        TreeError: the entry is badly named, missing, or not a patch we can apply.
    """
    match = PATCH_PATH.match(entry)
    if match is None:
        raise TreeError(f"{directory / SERIES}: {entry!r} is not GROUP/NNNN-name.patch")
    try:
        data = (directory / entry).read_bytes()
    except OSError as error:
        raise TreeError(
            f"{directory / entry}: listed in series, but {error.strerror}",
            fix="restore the file or remove the line",
        ) from None
    header_text, diff = split_patch(data)
    try:
        files = parse_diff(diff, *find_project(directory.name).roots)
    except ValueError as error:
        raise TreeError(f"{directory / entry}: {error}") from None
    return Patch(
        path=entry,
        group=match.group("group"),
        number=int(match.group("number")),
        name=match.group("name"),
        header=parse_header(header_text),
        header_text=header_text,
        files=files,
        data=data,
    )


def split_patch(data: bytes) -> tuple[str, bytes]:
    """Split a patch file into its header (without the line ``---``) and its diff."""
    start = re.search(rb"^(?:diff --git |--- \S)", data, re.MULTILINE)
    at = start.start() if start else len(data)
    header = data[:at].decode("utf-8", "replace")
    return re.sub(r"(?:^|(?<=\n))---\n?\Z", "", header), data[at:]


def load_queue(directory: Path | None = None) -> Queue:
    """Load a queue, by default the one of verl.

    Raises:
        TreeError: the series or a patch it lists is missing or malformed, or two patches of the
            series have the same name.
    """
    directory = (default_directory() if directory is None else directory).resolve()
    patches: dict[str, Patch] = {}
    for entry in read_series(directory):
        patch = load_patch(directory, entry)
        if patch.name in patches:
            raise TreeError(
                f"{directory / SERIES}: {entry} and {patches[patch.name].path} have the same name",
                fix="names are unique across groups, so that they can be used alone",
            )
        patches[patch.name] = patch
    return Queue(directory, directory.name, tuple(patches.values()))


@dataclass(frozen=True)
class PatchFit:
    """How one patch fitted the text that the patches before it left."""

    patch: Patch
    files: tuple[FileFit, ...]

    @property
    def fit(self) -> Fit:
        return combine(file.fit for file in self.files)

    @property
    def details(self) -> tuple[str, ...]:
        """One line for every file that does not fit exactly."""
        return tuple(file.describe() for file in self.files if file.fit is not Fit.EXACT)


@dataclass(frozen=True)
class Plan:
    """The result of patching in memory: contents before and after (None: no such file)."""

    before: dict[str, bytes | None]
    after: dict[str, bytes | None]
    fits: tuple[PatchFit, ...]

    def require(self, *allowed: Fit) -> Plan:
        """This plan, if each patch fits in an allowed way.

        Raises:
            TreeError: naming the first patch that does not, its files and hunks.
        """
        bad = [fit for fit in self.fits if fit.fit not in allowed]
        if bad:
            more = ", ".join(fit.patch.path for fit in bad[1:])
            more = f" (nor do: {more})" if more else ""
            raise TreeError(
                f"{bad[0].patch.path} does not fit: {'; '.join(bad[0].details)}{more}",
                fix="verl-p40 patches verify checks the queue against the pinned release",
            )
        return self


def plan_patches(read: Reader, patches: Sequence[Patch]) -> Plan:
    """Apply ``patches`` in memory to the files that ``read`` gives; nothing is written."""
    before: dict[str, bytes | None] = {}
    after: dict[str, bytes | None] = {}
    fits: list[PatchFit] = []
    for patch in patches:
        file_fits = []
        for file in patch.files:
            if file.path not in before:
                before[file.path] = after[file.path] = read(file.path)
            content, fit = _apply_file(file, after[file.path])
            after[file.path] = content
            file_fits.append(fit)
        fits.append(PatchFit(patch, tuple(file_fits)))
    return Plan(before, after, tuple(fits))


def _apply_file(file: FilePatch, content: bytes | None) -> tuple[bytes | None, FileFit]:
    if file.action == "add":
        if content is None:
            return file.added_text, FileFit(file.path, Fit.EXACT, (HunkFit(1, Fit.EXACT),))
        if content == file.added_text:
            return content, FileFit(file.path, Fit.UPSTREAM, reason="already there")
        return content, FileFit(file.path, Fit.CONFLICT, reason="exists with another content")
    if content is None:
        if file.action == "delete":
            return None, FileFit(file.path, Fit.UPSTREAM, reason="already gone")
        return None, FileFit(file.path, Fit.CONFLICT, reason="no such file")
    lines, hunks = apply_hunks(split_lines(content), file.hunks)
    fit = combine(hunk.fit for hunk in hunks)
    if file.action == "delete":
        if fit is Fit.EXACT and not lines:
            return None, FileFit(file.path, fit, hunks)
        return content, FileFit(file.path, Fit.CONFLICT, reason="differs from what is deleted")
    return b"".join(lines), FileFit(file.path, fit, hunks)
