"""How each Triton kernel of a release is launched, and whether the P40 path gets there: data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from verl_p40.errors import MachineError

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # libyaml is optional in PyYAML's source builds
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

Reach = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: () if value is False else tuple(value))
]
"""Settings of the P40 path that lead to a kernel; empty (``no`` in YAML) where none does."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Launch(_Strict):
    """One kernel.

    Attributes:
        launch: the function that launches it, in its own module; the kernel itself where nothing
            does. Its arguments are in the words of :mod:`verl_p40.kernels.arguments`.
        before: functions of the module to call first, with their arguments.
        vary: variables with several values: one variant for every combination.
        inlined_into: kernels that call it. It is then no launch of its own.
    """

    kernel: str
    launch: str = ""
    arguments: dict[str, Any] = {}
    before: dict[str, list[Any]] = {}
    vary: dict[str, list[Any]] = {}
    variables: dict[str, Any] = {}
    inlined_into: list[str] | None = None
    reached: Reach | None = None
    why: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Launch:
        if (self.inlined_into is None) == (not self.launch):
            raise ValueError(f"{self.kernel}: either launch or inlined_into")
        return self

    def variants(self, **chosen: list[Any]) -> Iterator[dict[str, Any]]:
        """The variables of every variant; ``chosen`` replaces the values of those it has."""
        vary = {**self.vary}
        for name, values in chosen.items():
            if values and (name in vary or name in self.variables):
                vary[name] = values
        for combination in itertools.product(*vary.values()):
            variables = {**self.variables, **dict(zip(vary, combination, strict=True))}
            if "x" in variables:  # vLLM's key cache splits a head into pieces of 16 bytes
                variables["x"] = 4 if variables["dtype"] == "float32" else 8
            yield variables


class Module(_Strict):
    module: str
    reached: Reach
    why: str
    kernels: list[Launch]


class Release(_Strict):
    """Every Triton kernel of a release."""

    project: str
    version: str
    modules: list[Module]

    def entries(self) -> Iterator[Kernel]:
        for module in self.modules:
            for launch in module.kernels:
                reached = module.reached if launch.reached is None else launch.reached
                yield Kernel(
                    module=module.module,
                    launch=launch,
                    reached=reached,
                    why=(launch.why or module.why).strip(),
                )


class Kernel(_Strict):
    """A kernel with what its module says of all of its kernels."""

    module: str
    launch: Launch
    reached: Reach
    why: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.launch.kernel}"


@cache
def load() -> dict[str, Release]:
    """The releases by project.

    Raises:
        MachineError: a data file is malformed, that is, the installation is broken.
    """
    found = {}
    for file in sorted(resources.files(__name__).iterdir(), key=lambda item: item.name):
        if file.name.endswith(".yaml"):
            try:
                release = Release.model_validate(yaml.load(file.read_text(), Loader=_Loader))
            except (yaml.YAMLError, ValidationError) as error:
                raise MachineError(f"{file.name}: {' '.join(str(error).split())}") from error
            found[release.project] = release
    return found
