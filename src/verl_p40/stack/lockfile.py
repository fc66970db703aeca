"""Hashed requirement files: reading them, and telling whether they say what the pins say."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from verl_p40.errors import MachineError, TreeError
from verl_p40.stack import paths

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_URL = re.compile(r"https?://|file:|git\+")


@dataclass(frozen=True)
class Locked:
    """One line of a lock: an exact version, for which interpreters, and its files' hashes."""

    name: str
    version: str
    requirement: Requirement
    hashes: frozenset[str]

    def applies(self, environment: Mapping[str, str]) -> bool:
        """Whether the line's marker holds in ``environment`` (PEP 508 variable names)."""
        marker = self.requirement.marker
        return marker is None or marker.evaluate(dict(environment))


def lock_path(name: str) -> Path:
    """The lock called ``name`` (a file name of ``locks/``).

    Raises:
        MachineError: it is not there.
    """
    path = paths.locks_dir() / name
    if not path.is_file():
        raise MachineError(f"lock file {name} is missing from {path.parent}", fix="nox -s lock")
    return path


def digest(*files: Path) -> str:
    """sha256 over the files' bytes, in the order given."""
    total = hashlib.sha256()
    for path in files:
        total.update(path.read_bytes())
    return total.hexdigest()


def parse(path: Path) -> list[Locked]:
    """Read a hashed requirement file.

    Raises:
        TreeError: a line has no hash, no exact version, or an address.
    """
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    locked = []
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        locked.append(_parse_line(line, path))
    return locked


def _parse_line(line: str, path: Path) -> Locked:
    body = line.split(" --hash=", 1)[0].strip()
    hashes = frozenset(_HASH.findall(line))
    problem = ""
    requirement: Requirement | None = None
    try:
        requirement = Requirement(body)
    except InvalidRequirement:
        problem = "is not a requirement"
    if requirement is not None:
        specifiers = list(requirement.specifier)
        if requirement.url or _URL.search(line):
            problem = "holds an address"
        elif len(specifiers) != 1 or specifiers[0].operator != "==":
            problem = "has no exact version"
        elif not hashes:
            problem = "has no hash"
        else:
            return Locked(
                canonicalize_name(requirement.name), specifiers[0].version, requirement, hashes
            )
    raise TreeError(f"{path.name}: `{body}` {problem}", fix="nox -s lock")


def versions(locked: Iterable[Locked]) -> dict[str, set[str]]:
    """Name → the versions a lock holds (several when markers tell them apart)."""
    found: dict[str, set[str]] = {}
    for item in locked:
        found.setdefault(item.name, set()).add(item.version)
    return found
