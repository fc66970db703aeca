"""Rules as data: the schema of the files in ``rules/``, and their loading."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from verl_p40.kernels.capability import Capability

Confidence = Literal["high", "medium", "low"]
Role = Literal["cause", "symptom", "harmless"]


def _compiles(pattern: str, info: ValidationInfo) -> str:
    if not (info.context or {}).get("compile"):
        return pattern
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]+$")]


class Example(BaseModel):
    """Lines as a real program wrote them, and where they were read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    log: str
    source: str = ""


class Advice(BaseModel):
    """One thing to do. ``cc``: for cards of these compute capabilities only, such as ``<7.0``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    do: str = Field(min_length=3)
    cc: Annotated[str, Field(pattern=r"^(?:(?:<|>=)\d+\.\d)?$")] = ""

    def suits(self, card: Capability | None) -> bool:
        """Whether it is for ``card``; None: the log does not tell which one it is about."""
        if not self.cc or card is None:
            return True
        older = card < Capability.parse(self.cc.lstrip("<>="))
        return older if self.cc.startswith("<") else not older


class Rule(BaseModel):
    """One mechanism by which a run breaks, or seems to.

    ``match`` is searched in each line (any of them); ``near`` must all be found within the lines
    around it that the same process wrote, ``frames`` (any of them) in the traceback above it;
    ``unless`` must not be found in the line or around it. Groups named in a pattern fill
    ``{name}`` in ``cause``, ``why`` and ``fix``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Name
    kind: str = ""
    role: Role = "cause"
    match: tuple[Pattern, ...] = Field(min_length=1)
    near: tuple[Pattern, ...] = ()
    frames: tuple[Pattern, ...] = ()
    unless: tuple[Pattern, ...] = ()
    cause: str = Field(min_length=10)
    why: str = ""
    confidence: Confidence = "high"
    fix: tuple[Advice, ...] = ()
    """What to do, in order. ``{arch}`` is the compute capability of the log's card, or 6.1."""
    read: tuple[str, ...] = ()
    versions: str = ""
    after_progress: bool = False
    """That training had made steps before the line stands for what ``near`` asks."""
    code: bool = False
    """Whether ``match`` may be found in a traceback's source lines, which name what might be raised."""
    weight: int = Field(default=3, ge=1, le=4)
    """4: nothing else explains it away; 3: a root cause; 2: may follow from another; 1: a last
    resort."""
    rank: int = Field(default=50, ge=0, le=100)
    """Which rule speaks for a line that several match."""
    hides: tuple[str, ...] = ()
    """Kinds that follow from this one."""
    fallback: bool = False
    """Speaks only where no other rule finds a cause, of the first error alone."""
    examples: tuple[Example, ...] = ()
    near_misses: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _one_or_many(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in (
                "match",
                "near",
                "frames",
                "unless",
                "fix",
                "read",
                "hides",
                "near_misses",
            ):
                if isinstance(data.get(name), str):
                    data[name] = [data[name]]
            data["fix"] = [
                {"do": one} if isinstance(one, str) else one for one in data.get("fix", ())
            ]
            data["examples"] = [
                {"log": one} if isinstance(one, str) else one for one in data.get("examples", [])
            ]
        return data

    @model_validator(mode="after")
    def _complete(self) -> Rule:
        if self.role == "cause" and not (self.fix and self.why):
            raise ValueError(f"{self.id}: a cause needs a fix and the reason for its confidence")
        if self.fallback and (self.role != "cause" or self.confidence != "low"):
            raise ValueError(f"{self.id}: a fallback is a cause of low confidence")
        if not self.examples:
            raise ValueError(f"{self.id}: give at least one real line that it must match")
        if self.role == "cause" and not self.near_misses:
            raise ValueError(f"{self.id}: give at least one near-miss that it must not match")
        return self

    @property
    def name(self) -> str:
        """The key of the mechanism; several rules may share it."""
        return self.kind or self.id


class Family(BaseModel):
    """One file of ``rules/``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    about: str = Field(min_length=10)
    rules: tuple[Rule, ...] = Field(min_length=1)


def parse(text: str, *, check_patterns: bool = True) -> Family:
    """One file's text. Compiling every pattern takes a second, so the package's own files, which
    a test has checked, are read without.

    Raises:
        pydantic.ValidationError, yaml.YAMLError: the file is not of the schema.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load(text, Loader=loader)
    return Family.model_validate(document, context={"compile": check_patterns})


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """All families of the package, by file name.

    Raises:
        ValueError: two rules have the same id.
    """
    folder = resources.files("verl_p40.diagnose").joinpath("rules")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    loaded = tuple(parse(file.read_text(encoding="utf-8"), check_patterns=False) for file in files)
    seen: set[str] = set()
    for rule in (rule for family in loaded for rule in family.rules):
        if rule.id in seen:
            raise ValueError(f"two rules are called {rule.id}")
        seen.add(rule.id)
    return loaded


def rules() -> tuple[Rule, ...]:
    """Every rule, in the order of the files."""
    return tuple(rule for family in families() for rule in family.rules)
