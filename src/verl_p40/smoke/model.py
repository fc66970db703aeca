"""What a check is, what it finds, and how it stands in the end. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Device = Literal["cpu", "cuda"]
Verdict = Literal["ok", "skipped", "failed"]
CODE = "sm_61 code generation"
PTX = "sm_61 PTX run on a newer GPU"
"""What a finding shows, where it is neither a CPU run nor a run on the card that is named."""


@dataclass(frozen=True)
class Check:
    """One line of the smoke test.

    Attributes:
        entry: ``module:function``, imported in the check's own process; it takes a
            :class:`Context` and returns a :class:`Finding`, or raises.
        where: the interpreter: that of the training stack, or the one that runs the command.
        limit: seconds until the check is ended and has failed.
        grace: seconds that it has to end by itself once it is asked to.
        gpu: ``only`` needs a GPU, ``either`` uses the chosen device, ``none`` looks at no device.
        gpu_mib: GPU memory in MiB that must be free, and is the most it may take.
        ram_mib: host memory in MiB that must be available.
        needs: checks that must have passed before.
    """

    name: str
    what: str
    entry: str
    where: Literal["stack", "command"] = "stack"
    dear: bool = False
    limit: float = 180.0
    grace: float = 5.0
    gpu: Literal["only", "either", "none"] = "either"
    gpu_mib: int = 0
    ram_mib: int = 0
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """What a check's process is told. ``scratch`` is a folder that all checks share."""

    device: Device
    scratch: Path
    gpu_mib: int = 0
    gpu_name: str = "a GPU"

    @property
    def category(self) -> str:
        """What a run here shows: ``CPU run``, or ``run on Tesla P40``, the card by its name."""
        return f"run on {self.gpu_name}" if self.device == "cuda" else "CPU run"

    def document(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "scratch": str(self.scratch),
            "gpu_mib": self.gpu_mib,
            "gpu_name": self.gpu_name,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Context:
        return cls(
            document["device"],
            Path(document["scratch"]),
            int(document["gpu_mib"]),
            str(document["gpu_name"]),
        )


@dataclass(frozen=True)
class Finding:
    """What a check that passed has seen: one line, what it shows, and figures for the report."""

    text: str
    category: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


class Skip(Exception):
    """The check cannot be made here; the message says why."""


class Failed(Exception):
    """The check was made and the machine or the stack did not pass; the message is one line."""

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = dict(details or {})


@dataclass(frozen=True)
class Result:
    """How one check ended. ``output`` is the last lines of a failed check's process."""

    check: Check
    verdict: Verdict
    text: str
    seconds: float = 0.0
    category: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    output: tuple[str, ...] = ()
