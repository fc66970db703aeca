"""Folders of its own for every test, and plain files in place of a trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VERL_P40_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("VERL_P40_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("VERL_P40_ENV", raising=False)
