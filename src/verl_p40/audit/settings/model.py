"""Settings rules as data: what they match, what is true, what to write instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from verl_p40.audit import yamlio

Kind = Literal["no-op", "wrong", "harmful", "ok-note"]
"""no-op: nobody reads it. wrong: it ends the run. harmful: it runs, but not as meant.
ok-note: it works; worth knowing."""

KINDS: tuple[Kind, ...] = ("harmful", "wrong", "no-op", "ok-note")
"""Worst first."""


@dataclass(frozen=True)
class SettingFinding:
    """One setting of a command, a script or an environment, and what is true about it."""

    kind: Kind
    rule: str
    setting: str
    line: int
    message: str
    replacement: str
    source: str

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "rule": self.rule,
            "setting": self.setting,
            "line": self.line,
            "message": self.message,
            "replacement": self.replacement,
            "source": self.source,
        }


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Condition(_Strict):
    """Another setting that must hold: ``key`` with its effective value (given, else default)."""

    key: str
    value: str = ""
    unset: bool = False
    """True: the command must not give the key."""


class Compare(_Strict):
    """``sum(left) op sum(right)`` is what must not be; ``not-multiple`` is about integers."""

    left: tuple[str, ...] = Field(min_length=1)
    op: Literal["<", ">", "not-multiple"]
    right: tuple[str, ...] = Field(min_length=1)
    product: tuple[str, ...] = ()
    """Keys whose values multiply the left side."""


class SettingRule(_Strict):
    """A rule. Exactly one of ``env``, ``key``, ``compare``, ``program``, ``pip`` selects it."""

    id: str
    kind: Kind
    env: str = ""
    key: tuple[str, ...] = ()
    compare: Compare | None = None
    program: str = ""
    pip: tuple[str, ...] = ()
    value: str = ""
    """Regular expression that the whole value (or, for a program, its arguments) must match."""
    not_value: str = ""
    supported: str = ""
    """For ``pip``: the versions that are fine; empty when none is."""
    default_counts: bool = False
    """For ``key``: also when the setting is not given and its default matches."""
    when: tuple[Condition, ...] = ()
    message: str = Field(min_length=15)
    replacement: str = ""
    source: str = Field(min_length=5)
    says: str = ""
    """What the line that ``source`` cites first (``path:line``) holds: a test reads it there."""

    @field_validator("value", "not_value", "program")
    @classmethod
    def _regex(cls, text: str) -> str:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return text

    @field_validator("supported")
    @classmethod
    def _specifier(cls, text: str) -> str:
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise ValueError(str(error)) from error
        return text

    @model_validator(mode="after")
    def _one(self) -> SettingRule:
        chosen = [self.env, self.key, self.compare, self.program, self.pip]
        if sum(map(bool, chosen)) != 1:
            raise ValueError("give exactly one of env, key, compare, program, pip")
        return self

    def value_matches(self, value: str) -> bool:
        if self.value and not re.fullmatch(self.value, value, re.IGNORECASE | re.DOTALL):
            return False
        return not (
            self.not_value and re.fullmatch(self.not_value, value, re.IGNORECASE | re.DOTALL)
        )


class KnownEnv(_Strict):
    """A family of environment variables whose readers are known: any other name does nothing."""

    prefix: str
    except_: str = Field("", alias="except")
    """A longer prefix that belongs to somebody else."""
    reader: str
    names: tuple[str, ...] = Field(min_length=1)


class RuleBook(_Strict):
    rules: tuple[SettingRule, ...]
    environments: tuple[KnownEnv, ...]

    @model_validator(mode="after")
    def _unique(self) -> RuleBook:
        ids = [rule.id for rule in self.rules]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            raise ValueError(f"rule id used twice: {twice[0]}")
        return self


def parse(text: str, origin: str) -> RuleBook:
    """Validate a rule file.

    Raises:
        UsageError: it is not one; names the first thing that is wrong.
    """
    return yamlio.parse(text, origin, RuleBook)


@lru_cache(maxsize=1)
def rule_book() -> RuleBook:
    """The shipped rules."""
    file = files("verl_p40.audit.settings") / "data" / "settings.yaml"
    return parse(file.read_text(encoding="utf-8"), str(file))
