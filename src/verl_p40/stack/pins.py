"""The pins: versions, file hashes, index addresses and architectures, each with its reason.

``pins.toml`` beside this module is the only place where they are written. This module gives it
types, so that a typing mistake in it fails at load, not in the middle of an install.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from verl_p40.errors import MachineError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PINS_FILE = Path(__file__).with_name("pins.toml")

FlavorName = Literal["cpu", "cu118"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Why = Annotated[str, Field(min_length=10)]
Timestamp = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PythonPin(_Frozen):
    supported: list[str]
    why: Why


class CudaPin(_Frozen):
    version: str
    minimum_driver: str
    minimum_driver_compatibility_mode: str
    last_pascal_driver_branch: str
    why: Why


class ArchPin(_Frozen):
    """Compute capabilities: the card's, the one to compile for, and those of published wheels."""

    target: str
    torch_cuda_arch_list: str
    torch_wheel: list[str]
    vllm_wheel: list[str]
    why: Why


class IndexPin(_Frozen):
    """A place files come from: the first variable that is set wins, then ``default``."""

    variables: list[str]
    default: str
    why: Why

    def url(self) -> str:
        """The address in force, without a trailing slash; empty when nothing says one."""
        for variable in self.variables:
            value = os.environ.get(variable, "").strip()
            if value:
                return value.rstrip("/")
        return self.default.rstrip("/")


class ReleasePin(_Frozen):
    """One published file, by hash. ``size`` is in bytes."""

    project: str
    version: str
    filename: str
    sha256: Sha256
    index: str
    why: Why
    size: int | None = None
    requires_python: str | None = None
    requires_dist: list[str] = []


class PackagePin(_Frozen):
    version: str
    why: Why
    extras: list[str] = []

    def requirement(self, name: str) -> str:
        """The requirement line, for example ``ray[default]==2.47.1``."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{name}{extras}=={self.version}"


class SdistOnly(_Frozen):
    names: list[str]
    why: Why


class TrainPins(_Frozen):
    exclude_newer: Timestamp
    packages: dict[str, PackagePin]
    sdist_only: SdistOnly
    why: Why


class FlavorPin(_Frozen):
    """A variant of the training stack: what differs from ``[train.packages]``."""

    lock: str
    python: list[str]
    why: Why
    release: list[str] = []
    packages: dict[str, PackagePin] = {}
    overrides: dict[str, PackagePin] = {}


class UvPin(_Frozen):
    version: str
    why: Why


class ToolPins(_Frozen):
    exclude_newer: Timestamp
    build: list[str]
    newer: list[str]
    why: Why


class ExtraPins(_Frozen):
    exclude_newer: Timestamp
    packages: list[str]
    why: Why


class Pins(_Frozen):
    """The whole of ``pins.toml``. ``schema_version`` counts its incompatible changes."""

    schema_version: Literal[1] = Field(alias="schema")
    python: PythonPin
    cuda: CudaPin
    arch: ArchPin
    index: dict[str, IndexPin]
    release: dict[str, ReleasePin]
    train: TrainPins
    flavor: dict[FlavorName, FlavorPin]
    vllm: ExtraPins
    vllm_build: ExtraPins
    uv: UvPin
    tool: ToolPins
    dev: ExtraPins
    train_test: ExtraPins

    @model_validator(mode="after")
    def _cross_references(self) -> Pins:
        for name, release in self.release.items():
            if release.index not in self.index:
                raise ValueError(f"release.{name} names an unknown index: {release.index}")
        for flavor, pin in self.flavor.items():
            for release_name in pin.release:
                if release_name not in self.release:
                    raise ValueError(f"flavor.{flavor} names an unknown release: {release_name}")
            if unsupported := set(pin.python) - set(self.python.supported):
                raise ValueError(f"flavor.{flavor}: unsupported Python {sorted(unsupported)}")
        return self

    def packages(self, flavor: FlavorName) -> dict[str, PackagePin]:
        """Every directly pinned package of a flavor, by name."""
        return {**self.train.packages, **self.flavor[flavor].packages}

    def find_release(self, name: str) -> ReleasePin:
        """The pinned file called ``name`` in ``pins.toml``.

        Raises:
            UsageError: no release has that name; the message lists those there are.
        """
        try:
            return self.release[name]
        except KeyError:
            known = ", ".join(sorted(self.release))
            raise UsageError(
                f"no pinned release is called {name!r}", fix=f"one of: {known}"
            ) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file (tomllib on 3.11, tomli on 3.10)."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def load() -> Pins:
    """Read ``pins.toml`` (once a process).

    Raises:
        MachineError: the file is missing or malformed, that is, the installation is broken.
    """
    try:
        return Pins.model_validate(read_toml(PINS_FILE))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise MachineError(
            f"{PINS_FILE.name} cannot be read: {' '.join(str(error).split())}",
            fix="reinstall verl-p40, or undo the edit of src/verl_p40/stack/pins.toml",
        ) from error
