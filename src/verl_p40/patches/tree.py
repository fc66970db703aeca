"""Applying the queue to an unpacked or installed tree, and telling in which state a tree is.

A *tree* is the folder that contains the package folder, usually ``site-packages`` (project.py has
the two forms of it). Files are never written in place: uv shares them with its cache through hard
links, so a whole folder is copied, patched and exchanged (see swap.py): the package, or for a
source tree the tree itself.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_p40.errors import TreeError
from verl_p40.patches.hunks import Fit
from verl_p40.patches.manifest import files_below, sha256
from verl_p40.patches.marker import (
    MARKER,
    PRISTINE,
    ChangedFile,
    Marker,
    read_marker,
    read_pristine,
    write_marker,
)
from verl_p40.patches.project import BUILD_GROUP, Project, find_project
from verl_p40.patches.queue import Queue, load_queue, plan_patches
from verl_p40.patches.swap import copy_folder, exclusive, next_folder, previous_folder, swap_in

_CODE = (".py", ".so")
"""Unknown files with these endings can shadow or extend the package; others are data."""


@dataclass(frozen=True)
class Difference:
    """One file that is neither as released nor as we patched it."""

    path: str
    why: Literal["changed", "missing", "unknown"]

    def __str__(self) -> str:
        return f"{self.path} ({self.why})"


@dataclass(frozen=True)
class TreeState:
    """What a tree holds."""

    tree: Path
    kind: Literal["pristine", "patched", "foreign", "missing"]
    digest: str = ""
    """Digest of the queue that was applied; empty unless patched."""
    patches: tuple[str, ...] = ()
    """Paths of the applied patches, in order."""
    files: tuple[Difference, ...] = ()
    """What makes it foreign."""
    repairable: bool = False
    """``apply`` can still make it right offline: nothing in it is unknown to us."""

    def describe(self) -> str:
        """One line for people."""
        if self.kind == "patched":
            return f"{self.tree}: patched, {len(self.patches)} patches, queue {self.digest[:12]}"
        if self.kind == "foreign":
            shown = ", ".join(str(file) for file in self.files[:8])
            more = f" and {len(self.files) - 8} more" if len(self.files) > 8 else ""
            return f"{self.tree}: not the pinned release: {shown}{more}"
        return f"{self.tree}: {self.kind}"


@dataclass(frozen=True)
class ApplyReport:
    """What :func:`apply_queue` or :func:`revert` did."""

    tree: Path
    changed: bool
    """False if the tree was already as asked for."""
    digest: str
    patches: tuple[str, ...]
    files: tuple[str, ...]
    """The files of the tree that now differ from the release."""
    left_out: tuple[str, ...] = ()
    recovered: bool = False
    """A crashed call had left the package moved aside; it was put back first."""
    shifted: tuple[str, ...] = ()
    """Hunks that went in at another line, possible only for a part of the queue."""


def tree_state(tree: Path, queue: Queue | None = None) -> TreeState:
    """Compare every file of the release with the manifest and with the marker.

    Bytecode is ignored; so are data files that the release does not have, and what a build writes.

    Args:
        tree: the folder that contains the package.
        queue: the queue whose manifest counts, by default that of verl.

    Raises:
        TreeError: the queue itself cannot be read.
    """
    queue = (load_queue() if queue is None else queue).fitting(tree)
    unit = _unit(tree, queue.facts)
    if not (tree / queue.project).is_dir():
        aside = previous_folder(unit).is_dir()
        return TreeState(tree, "missing", repairable=aside)
    marker = own_marker(tree, queue.project)
    ours = {} if marker is None else marker.files
    roots = queue.facts.roots if unit == tree else (queue.project,)
    found = {
        name: sha256(path.read_bytes())
        for name, path in files_below(tree, *roots).items()
        if name in ours or not queue.facts.is_built(name)
    }
    source = queue.facts.is_source(tree)
    differences: list[Difference] = []
    matching = stale = 0
    compared = {name for name in queue.manifest if not queue.facts.is_built(name)}
    for name in sorted({*compared, *ours, *found}):
        released, now = queue.manifest.get(name), found.get(name)
        if name in ours and ours[name].before == released and now == ours[name].after:
            matching += 1
        elif now == released and name in ours:
            stale += 1
        elif now == released:
            continue
        elif now is None:
            if source or not queue.facts.is_unpackaged(name):
                differences.append(Difference(name, "missing"))
        elif released is not None or name in ours:
            differences.append(Difference(name, "changed"))
        elif name.endswith(_CODE):
            differences.append(Difference(name, "unknown"))
    if differences:
        return TreeState(tree, "foreign", files=tuple(differences))
    if marker is None or matching == 0:
        return TreeState(tree, "pristine")
    if stale:
        # Part of the files are released ones again: reinstalled over a patched tree.
        back = [name for name in ours if found.get(name) != ours[name].after]
        changed = tuple(Difference(name, "changed") for name in sorted(back))
        return TreeState(tree, "foreign", files=changed, repairable=True)
    return TreeState(tree, "patched", marker.digest, marker.patches)


def apply_queue(
    tree: Path,
    queue: Queue,
    *,
    groups: Iterable[str] | None = None,
    without: Iterable[str] = (),
) -> ApplyReport:
    """Make ``tree`` the pinned release plus the selected patches: all of it or nothing.

    An already patched tree is brought to the selection from the pristine copies it carries, so
    this also updates, and undoes earlier choices. Applying the same again changes nothing.

    Args:
        tree: the folder that contains the package.
        queue: what to apply.
        groups: only these groups; None means all.
        without: names of patches to leave out, with what depends on them.

    Raises:
        TreeError: the tree is not the pinned release, or a patch does not apply. The whole queue
            must fit exactly; a part of it may be shifted by the lines of what is left out.
        UsageError: an unknown group or patch.
        BusyError, DiskError, MachineError: see :func:`verl_p40.patches.swap.exclusive`.
    """
    queue = queue.fitting(tree)
    selection = queue.select(groups, without)
    whole = len(selection.patches) == len(queue.patches)
    unit = _unit(tree, queue.facts)
    names = tuple(patch.path for patch in selection.patches)
    left_out = tuple(patch.path for patch in selection.left_out)
    _refuse_symlink(tree / queue.project)
    with exclusive(unit) as recovered:
        state = tree_state(tree, queue)
        if state.kind == "missing" or (state.kind == "foreign" and not state.repairable):
            raise _refusal(state, queue)
        marker = own_marker(tree, queue.project)
        reader = PristineReader(tree, marker)
        plan = plan_patches(reader, selection.patches)
        plan.require(*((Fit.EXACT,) if whole else (Fit.EXACT, Fit.OFFSET)))
        files = tuple(sorted(n for n in plan.after if plan.after[n] != plan.before[n]))
        if names:
            done = state.kind == "patched" and (state.digest, state.patches) == (
                queue.digest,
                names,
            )
        else:
            done = state.kind == "pristine" and marker is None
        if not done:
            changes = {name: plan.after[name] for name in files}
            _write(tree, queue.facts, reader, changes, queue, names)
        shifted = tuple(line for fit in plan.fits for line in fit.details)
        return ApplyReport(tree, not done, queue.digest, names, files, left_out, recovered, shifted)


def revert(tree: Path, project: str = "verl") -> ApplyReport:
    """Put the released files back, from the copies that ``apply_queue`` left in the tree.

    Needs neither network nor queue. A tree without a marker is left as it is.

    Raises:
        TreeError: there is no such package, or a patched file was edited since.
        BusyError, DiskError, MachineError: see :func:`verl_p40.patches.swap.exclusive`.
    """
    package = tree / project
    _refuse_symlink(package)
    with exclusive(_unit(tree, find_project(project))) as recovered:
        marker = own_marker(tree, project)
        if not package.is_dir():
            raise _no_package(package)
        if marker is None:
            return ApplyReport(tree, False, "", (), (), recovered=recovered)
        reader = PristineReader(tree, marker)
        edited = [name for name in sorted(marker.files) if reader.edited(name)]
        if edited:
            raise TreeError(
                f"{tree}: edited since the patches were applied: {', '.join(edited)}",
                fix=f"save your edits, then reinstall {project} {marker.version}",
            )
        _write(tree, find_project(project), reader, {}, None, ())
        return ApplyReport(tree, True, "", (), (), recovered=recovered)


def own_marker(tree: Path, project: str) -> Marker | None:
    """The marker of ``tree``. A wheel built from a patched source tree carries that tree's marker:
    what it says of files beside the package does not concern the installed package.
    """
    marker = read_marker(tree / project)
    facts = find_project(project)
    if marker is None or not facts.beside or facts.is_source(tree):
        return marker
    return marker.model_copy(
        update={
            "patches": tuple(p for p in marker.patches if not p.startswith(f"{BUILD_GROUP}/")),
            "files": {name: file for name, file in marker.files.items() if facts.inside(name)},
        }
    )


def _unit(tree: Path, project: Project) -> Path:
    """The folder that is exchanged as a whole."""
    return tree if project.is_source(tree) else tree / project.name


class PristineReader:
    """Reads files of a tree as the release had them, whether patched or not."""

    def __init__(self, tree: Path, marker: Marker | None) -> None:
        self.tree = tree
        self.ours: Mapping[str, ChangedFile] = {} if marker is None else marker.files
        self._copies: dict[str, bytes] | None = None
        self._package = tree / (marker.project if marker else "")

    def __call__(self, name: str) -> bytes | None:
        path = self.tree / name
        content = path.read_bytes() if path.is_file() else None
        if name not in self.ours:
            return content
        before = self.ours[name].before
        if before is None:
            return None
        if content is not None and sha256(content) == before:
            return content
        if self._copies is None:
            self._copies = read_pristine(self._package)
        copy = self._copies.get(name)
        if copy is None or sha256(copy) != before:
            raise TreeError(
                f"{self._package / PRISTINE}: has no good copy of {name}",
                fix=f"reinstall {self._package.name}, then run verl-p40 patches apply",
            )
        return copy

    def edited(self, name: str) -> bool:
        """Whether a patched file is neither as released nor as patched."""
        path = self.tree / name
        now = sha256(path.read_bytes()) if path.is_file() else None
        return now not in (self.ours[name].before, self.ours[name].after)


def _write(
    tree: Path,
    project: Project,
    reader: PristineReader,
    changes: Mapping[str, bytes | None],
    queue: Queue | None,
    patches: tuple[str, ...],
) -> None:
    """Build the unit anew with ``changes`` on the released files, and exchange it."""
    unit = _unit(tree, project)
    staging = next_folder(unit)
    package = staging / (tree / project.name).relative_to(unit)
    contents = {name: reader(name) for name in reader.ours} | dict(changes)
    released = {name: reader(name) for name in changes}
    copy_folder(unit, staging)
    for leftover in (MARKER, PRISTINE):
        (package / leftover).unlink(missing_ok=True)
    for name, content in contents.items():
        _replace(staging / (tree / name).relative_to(unit), content, staging)
    if queue is not None and patches:
        marker = Marker(
            project=queue.project,
            version=queue.version,
            digest=queue.digest,
            patches=patches,
            files={
                name: ChangedFile(before=_hash(released[name]), after=_hash(content))
                for name, content in sorted(changes.items())
            },
        )
        copies = {name: data for name, data in released.items() if data is not None}
        write_marker(package, marker, copies)
    swap_in(unit)


def _replace(path: Path, content: bytes | None, root: Path) -> None:
    """Write or remove one file of the staging folder, and its bytecode."""
    mode = path.stat().st_mode & 0o777 if path.exists() else None
    path.unlink(missing_ok=True)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if mode is not None:
            path.chmod(mode)
        return
    for folder in path.parents:
        # A folder that only held what a patch added would stay importable as a namespace.
        rest = [item for item in folder.iterdir() if item.name != "__pycache__"]
        if folder == root or rest:
            break
        shutil.rmtree(folder)


def _hash(content: bytes | None) -> str | None:
    return None if content is None else sha256(content)


def _refuse_symlink(package: Path) -> None:
    if package.is_symlink():
        raise TreeError(
            f"{package} is a symbolic link: patches go into an installed copy, not into a checkout",
            fix=f"install {package.name} normally (not editable), or name another tree",
        )


def _no_package(package: Path) -> TreeError:
    return TreeError(
        f"{package.parent}: no folder {package.name} in it",
        fix=f"name the site-packages folder into which {package.name} is installed",
    )


def _refusal(state: TreeState, queue: Queue) -> TreeError:
    if state.kind == "missing":
        return _no_package(state.tree / queue.project)
    found = _stated_version(state.tree / queue.project)
    other = f" (it is {queue.project} {found})" if found not in ("", queue.version) else ""
    return TreeError(
        state.describe() + other,
        fix=f"reinstall {queue.project}=={queue.version} without touching its files, then apply",
    )


def _stated_version(package: Path) -> str:
    """The version that the package itself states; empty if it does not."""
    plain, generated = package / "version" / "version", package / "_version.py"
    if plain.is_file():  # verl
        return plain.read_text("utf-8").strip()
    if generated.is_file():  # setuptools_scm: vllm
        match = re.search(r"^__version__.*= '([^']+)'", generated.read_text("utf-8"), re.MULTILINE)
        return match.group(1) if match else ""
    return ""
