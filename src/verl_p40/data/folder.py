"""A prepared folder: made under a temporary name, then renamed, and known by its record.

``recipe.json`` in it says what it was made from and the sha256 of every file. A folder without
one was not made here and is never replaced.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from verl_p40 import __version__
from verl_p40.errors import DataError, DiskError
from verl_p40.stack.hold import exclusive

RECORD: Final = "recipe.json"
_NO_SPACE: Final = 28


def digest(recipe: Mapping[str, Any]) -> str:
    """Hex sha256 of a recipe: the same recipe makes the same folder."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """The contents of ``recipe.json``."""

    kind: str
    digest: str
    recipe: dict[str, Any]
    facts: dict[str, Any]
    """What was measured while making it (rows, accuracy)."""
    files: dict[str, str]
    """Path relative to the folder → sha256."""


def read(folder: Path) -> Record | None:
    """The record of ``folder``, or None where there is none (or not one of ours)."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return Record(
            str(found["kind"]),
            str(found["digest"]),
            dict(found["recipe"]),
            dict(found["facts"]),
            dict(found["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_whole(folder: Path, record: Record) -> bool:
    """Whether every file of the record is there, byte for byte."""
    return bool(record.files) and all(
        (folder / name).is_file() and sha256_of(folder / name) == expected
        for name, expected in record.files.items()
    )


def sha256_of(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as source:
        while piece := source.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def make(
    target: Path,
    kind: str,
    recipe: Mapping[str, Any],
    build: Callable[[Path], Mapping[str, Any]],
    *,
    reuse: Callable[[Record], bool],
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[Record, bool]:
    """Make ``target`` unless a whole one that ``reuse`` accepts is there.

    ``build`` fills an empty folder and returns its facts. Two processes may ask at once: the
    second waits, then reuses what the first made. Nothing is ever half-made under ``target``'s
    name, and what was there before stays until the new one is complete.

    Returns:
        The record, and whether the folder was there already.

    Raises:
        DataError: ``target`` exists and was not made by this program.
        DiskError: the disk is full.
    """
    target = target.absolute()
    _mkdir(target.parent)
    with exclusive(target.parent / f".{target.name}.lock", on_wait):
        existing = read(target)
        usable = existing is not None and existing.kind == kind and reuse(existing)
        if existing is not None and usable and is_whole(target, existing):
            return existing, True
        if existing is None and target.exists() and not _is_empty_folder(target):
            raise DataError(
                f"{target} exists and was not made by `verl-p40 data`: it is left as it is",
                fix="choose another folder with --out, or move this one away",
            )
        fresh = target.with_name(f".{target.name}.new")
        old = target.with_name(f".{target.name}.old")
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            fresh.mkdir()
            facts = build(fresh)
            record = _write_record(fresh, kind, recipe, facts)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
        except OSError as error:
            if error.errno == _NO_SPACE:
                raise DiskError(
                    f"the disk of {target.parent} is full",
                    fix="free some space, or choose another folder with --out",
                ) from error
            raise DataError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        return record, False


def _mkdir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the folder {folder}: {error.strerror or error}",
            fix="choose another one with --out, or set VERL_P40_DATA",
        ) from error


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _write_record(
    folder: Path, kind: str, recipe: Mapping[str, Any], facts: Mapping[str, Any]
) -> Record:
    files = {
        path.relative_to(folder).as_posix(): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    record = Record(kind, digest(recipe), dict(recipe), dict(facts), files)
    document = {"made_by": f"verl-p40 {__version__}", **record.__dict__}
    (folder / RECORD).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return record
