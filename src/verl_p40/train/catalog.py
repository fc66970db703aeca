"""The presets: hydra files on top of verl's own config, and what each says about itself."""

from __future__ import annotations

import difflib
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_p40.errors import UsageError
from verl_p40.stack import paths

DEFAULT_PRESET = "cpu-demo"


class Shown(str, Enum):
    """On what hardware a preset has really been run. No other wording is allowed."""

    CPU = "CPU run"
    CODE = "sm_61 code generation"
    PTX = "sm_61 PTX run on a newer GPU"
    CAPPED = "24 GB-capped run on another GPU"
    PLANNED = "planned only"


class Variable(BaseModel):
    """An environment variable the trainer is started with, unless the user has set it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: str
    why: str = Field(min_length=10)
    noop: bool = False
    """True for a variable that nothing reads, exported only because people expect it."""


class About(BaseModel):
    """The top-level ``verl_p40`` section of a preset. verl itself does not read it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str = Field(min_length=10)
    shown: Shown
    data: Literal["demo", "gsm8k", "none"]
    model: str
    env: dict[str, Variable] = {}


class Preset(BaseModel):
    """One preset file."""

    model_config = ConfigDict(frozen=True)

    name: str
    path: Path
    about: About

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


def parse_about(section: Any, where: str) -> About:
    """Read a ``verl_p40`` section.

    Raises:
        UsageError: it is missing or malformed; the first problem is named.
    """
    if section is None:
        raise UsageError(
            f"{where} has no verl_p40 section",
            fix="start from a preset: `defaults: [cpu-demo, _self_]`, or copy its verl_p40 section",
        )
    try:
        return About.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["verl_p40", *map(str, first["loc"])])
        raise UsageError(f"{where}: {place}: {first['msg']}") from error


def names() -> list[str]:
    """Preset names, sorted. Files whose name begins with ``_`` are shared parts."""
    return sorted(p.stem for p in paths.presets_dir().glob("*.yaml") if p.stem[0] != "_")


def load(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        UsageError: there is none; the nearest names are given.
    """
    path = locate(name)
    section = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("verl_p40")
    return Preset(name=path.stem, path=path, about=parse_about(section, path.name))


def locate(name: str) -> Path:
    """The file of a preset: one of ours by name, or the path of the user's own ``.yaml``.

    Raises:
        UsageError: neither exists.
    """
    known = names()
    if name in known:
        return paths.presets_dir() / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        own = Path(name).expanduser().resolve()
        if own.is_file():
            return own
        raise UsageError(f"preset file {name} does not exist")
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise UsageError(
        f"unknown preset {name!r}" + (f"; nearest: {', '.join(near)}" if near else ""),
        fix=f"one of {', '.join(known)}, or the path of a .yaml file (`verl-p40 presets`)",
    )


def all_presets() -> list[Preset]:
    return [load(name) for name in names()]
