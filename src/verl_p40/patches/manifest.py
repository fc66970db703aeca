"""The manifest of a pinned release: one line ``sha256  path`` a file, as ``sha256sum`` writes it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from verl_p40.errors import TreeError

FILE_NAME = "upstream.sha256"

_LINE = re.compile(r"^([0-9a-f]{64})  (\S.*)$")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load_manifest(path: Path) -> dict[str, str]:
    """Read a manifest: path relative to the tree -> sha256 in hex.

    Raises:
        TreeError: the file is missing, empty or has a line of another form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TreeError(
            f"{path}: cannot read the manifest of the pinned release ({error})",
            fix="restore it from the repository, or write it anew: verl-p40 patches refresh DIR",
        ) from None
    manifest: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _LINE.match(line)
        if match is None or match.group(2) in manifest:
            raise TreeError(f"{path}:{number}: not a new 'sha256  path' line: {line[:100]!r}")
        manifest[match.group(2)] = match.group(1)
    if not manifest:
        raise TreeError(f"{path}: the manifest is empty")
    return manifest


def format_manifest(manifest: Mapping[str, str]) -> str:
    """The text of a manifest file, sorted by path."""
    return "".join(f"{manifest[path]}  {path}\n" for path in sorted(manifest))


def files_below(tree: Path, *roots: str) -> dict[str, Path]:
    """Every file at or below ``tree/root`` by its path relative to ``tree``, bytecode left out."""
    paths = (path for root in roots for path in (tree / root, *sorted((tree / root).rglob("*"))))
    return {
        path.relative_to(tree).as_posix(): path
        for path in paths
        if path.suffix not in (".pyc", ".pyo") and path.is_file()
    }


def manifest_of(tree: Path, *roots: str) -> dict[str, str]:
    """The manifest of an unpacked release."""
    return {name: sha256(path.read_bytes()) for name, path in files_below(tree, *roots).items()}
