"""A local index, a home of our own, and no setting of this machine in the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flaky import Site

CLEARED = (
    *("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "PIP_CONFIG_FILE"),
    *("VERL_P40_ENV", "VERL_P40_TORCH_INDEX", "HF_ENDPOINT"),
    *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``VERL_P40_HOME`` in a temporary folder; no index is configured."""
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VERL_P40_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def site(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A running site that is the configured package index."""
    with Site() as running:
        monkeypatch.setenv("UV_DEFAULT_INDEX", running.index)
        yield running
