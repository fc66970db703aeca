"""What several rooms' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_p40.train import source


@pytest.fixture(scope="session")
def verl_config() -> Path:
    """``verl/trainer/config`` of the pinned wheel (fetched by hash, cached) with our patches."""
    return source.config_folder(None)
