"""A stack that is this interpreter, checks from ``probes``, and a listener that remembers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from verl_p40.smoke.model import Check, Result
from verl_p40.stack.env import StackEnv
from verl_p40.stack.record import EnvRecord

HERE = Path(__file__).parent


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> StackEnv:
    """This interpreter as the stack; checks' processes find ``probes``."""
    old = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), old])))
    record = EnvRecord(
        flavor="cpu",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        lock_digest="0" * 64,
        created="2026-01-01T00:00:00Z",
    )
    return StackEnv(Path(sys.prefix), Path(sys.executable), record)


@pytest.fixture
def probe() -> Callable[..., Check]:
    """``probe("abort", limit=5)``: a check whose work is ``probes.abort``."""

    def make(name: str, **fields: Any) -> Check:
        fields.setdefault("gpu", "none")
        fields.setdefault("limit", 60.0)
        return Check(name, f"probe {name}", f"probes:{name}", **fields)

    return make


@dataclass
class Remembering:
    """A listener."""

    begun: list[str] = field(default_factory=list)
    ended: list[Result] = field(default_factory=list)
    ticks: int = 0

    def begin(self, check: Check) -> None:
        self.begun.append(check.name)

    def tick(self, check: Check, seconds: float) -> None:
        self.ticks += 1

    def end(self, result: Result) -> None:
        self.ended.append(result)


@pytest.fixture
def listener() -> Remembering:
    return Remembering()
