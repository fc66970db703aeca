"""The real config of the pinned verl, patched, and plain files in place of a trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_p40.train import source


@pytest.fixture(scope="session")
def verl_config() -> Path:
    """``verl/trainer/config`` of the pinned wheel (fetched by hash, cached) with our patches."""
    return source.config_folder(None)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VERL_P40_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("VERL_P40_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("VERL_P40_ENV", raising=False)
