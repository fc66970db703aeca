"""The real config of the pinned verl, patched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from verl_p40.plan.fit import Plan, default_card, later_wins, make_plan
from verl_p40.train.compose import compose


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("VERL_P40_ENV", raising=False)


Composer = Callable[..., Callable[[Sequence[str]], dict[str, Any]]]


@pytest.fixture
def composer(verl_config: Path) -> Composer:
    """``composer("p40-ppo", "a=1")``: composes that, with more overrides."""

    def bind(preset: str, *overrides: str) -> Callable[[Sequence[str]], dict[str, Any]]:
        return lambda more: compose(preset, later_wins([*overrides, *more]), verl_config).config

    return bind


@pytest.fixture
def planned(composer: Composer) -> Callable[..., Plan]:
    def plan(preset: str, *overrides: str, card: int = default_card()) -> Plan:
        return make_plan(composer(preset, *overrides)([]), card)

    return plan
