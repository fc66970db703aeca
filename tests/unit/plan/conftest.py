"""The real config of the pinned verl, patched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from verl_p40.plan.fit import Plan, default_card, make_plan
from verl_p40.train.compose import Variants, compose


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("VERL_P40_ENV", raising=False)


Composer = Callable[..., Callable[[Sequence[str]], dict[str, Any]]]


@pytest.fixture
def composer(verl_config: Path) -> Composer:
    """``composer("p40-ppo", "a=1")``: composes that, with more overrides."""
    return lambda preset, *overrides: Variants(preset, overrides, verl_config)


@pytest.fixture
def planned(verl_config: Path) -> Callable[..., Plan]:
    def plan(preset: str, *overrides: str, card: int = default_card()) -> Plan:
        return make_plan(compose(preset, overrides, verl_config).config, card)

    return plan
