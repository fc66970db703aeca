"""The reviewed file: why a site is off the P40 path or harmless on it, and what would change that.

A reason is only as good as the facts behind it, so an entry states them in a form that the audit
checks against the tree it reads: which setting leads to the site (and that it is not the tree's
default), that no import leads to the file, or which files alone name a function.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl_p40.audit import yamlio
from verl_p40.audit.model import Finding, Status
from verl_p40.audit.rules import RULES


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reach(_Strict):
    """What would lead to the site: a setting's values, a module that is run, or a package."""

    setting: str = ""
    values: tuple[str, ...] = ()
    module: str = ""
    package: str = ""

    @model_validator(mode="after")
    def _one(self) -> Reach:
        if sum(map(bool, (self.setting, self.module, self.package))) != 1:
            raise ValueError("give exactly one of setting, module, package")
        if bool(self.setting) != bool(self.values):
            raise ValueError("a setting needs values, and only a setting has them")
        return self

    def __str__(self) -> str:
        if self.setting:
            return f"{self.setting}={'|'.join(self.values)}"
        return f"python -m {self.module}" if self.module else f"installing {self.package}"


class Gate(_Strict):
    """An import that only ``reached_by`` opens; the import graph does not follow it."""

    path: str
    imports: tuple[str, ...]
    reason: str
    reached_by: tuple[Reach, ...] = Field(min_length=1)


class Entry(_Strict):
    """A reviewed group of sites."""

    id: str
    status: Literal["unreachable", "accepted"]
    path: tuple[str, ...] = Field(min_length=1)
    rule: tuple[str, ...] = ("*",)
    qualname: tuple[str, ...] = ("*",)
    code: tuple[str, ...] = ("*",)
    sites: int = Field(gt=0, description="how many sites were reviewed; more is a drift")
    reason: str = Field(min_length=20)
    reached_by: tuple[Reach, ...] = ()
    never_imported: bool = False
    """No import from the entry points leads to these files, gates aside."""
    only_named_in: dict[str, tuple[str, ...]] = {}
    """Function name: the only files (globs) of the package that name it."""
    tree: Literal["any", "patched"] = "any"
    """``patched``: the site comes with the patch queue."""

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        unknown = [rule for rule in self.rule if rule != "*" and rule not in RULES]
        if unknown:
            raise ValueError(f"unknown rule {unknown[0]}")
        if self.status == "unreachable" and not (
            self.reached_by or self.never_imported or self.only_named_in
        ):
            raise ValueError("an unreachable entry says what would reach it, or how it is shut off")
        return self

    def matches(self, finding: Finding) -> bool:
        return (
            _any(self.path, finding.path)
            and (self.rule == ("*",) or finding.rule in self.rule)
            and _any(self.qualname, finding.qualname)
            and _any(self.code, finding.code)
        )

    def mark(self, finding: Finding) -> Finding:
        return finding.marked(
            Status(self.status),
            reason=" ".join(self.reason.split()),
            entry=self.id,
            reached_by=tuple(str(reach) for reach in self.reached_by),
        )


class Defect(_Strict):
    """A known upstream bug, recognised by the code of a function or class."""

    id: str
    path: str
    qualname: str
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    reason: str


class Reviewed(_Strict):
    """One reviewed file: one release of one package."""

    package: str
    version: str
    roots: tuple[str, ...]
    """Modules that a run on the P40 path starts."""
    config: str
    """The YAML file with the defaults that ``reached_by`` is checked against."""
    gates: tuple[Gate, ...] = ()
    defects: tuple[Defect, ...] = ()
    entries: tuple[Entry, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Reviewed:
        ids = [entry.id for entry in self.entries] + [defect.id for defect in self.defects]
        twice = {name for name in ids if ids.count(name) > 1}
        if twice:
            raise ValueError(f"id used twice: {sorted(twice)}")
        return self


def load(package: str, version: str) -> Reviewed | None:
    """The reviewed file of a release, or None: then every site of it counts."""
    file = files("verl_p40.audit") / "reviewed_files" / f"{package}-{version}.yaml"
    if not file.is_file():
        return None
    return parse(file.read_text(encoding="utf-8"), str(file))


def parse(text: str, origin: str) -> Reviewed:
    """Validate a reviewed file.

    Raises:
        UsageError: it is not one; names the first thing that is wrong.
    """
    return yamlio.parse(text, origin, Reviewed)


def _any(globs: tuple[str, ...], text: str) -> bool:
    return any(glob_regex(glob).fullmatch(text) for glob in globs)


@cache
def glob_regex(glob: str) -> re.Pattern[str]:
    """A glob with ``*`` (anything but ``/``) and ``**`` (anything); code may hold ``[`` and ``?``.

    A lone ``*`` matches anything.
    """
    if glob == "*":
        return re.compile(".*", re.DOTALL)
    parts = re.split(r"(\*\*|\*)", glob)
    table = {"**": ".*", "*": "[^/]*"}
    return re.compile("".join(table.get(part, re.escape(part)) for part in parts), re.DOTALL)
