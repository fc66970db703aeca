"""The ModelScope path, against a local server (needs no training stack)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hubserver import Hub, serving

from verl_p40.data import hub as hubs
from verl_p40.errors import NetworkError

FILES = {name: (name * 5000).encode() for name in hubs.FILES.values()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("VERL_P40_HOME", str(tmp_path))
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with serving(Hub(dict(FILES))) as running:
        monkeypatch.setenv("MODELSCOPE_DOMAIN", running.url)
        yield running


def test_downloads_both_splits_and_only_once(hub: Hub) -> None:
    found = hubs.download("modelscope")
    assert {split: paths[0].read_bytes() for split, paths in found.items()} == {
        split: FILES[name] for split, name in hubs.FILES.items()
    }
    gets = len([line for line in hub.requests if "FilePath" in line])
    hubs.download("modelscope")
    assert len([line for line in hub.requests if "FilePath" in line]) == gets == 2


def test_a_broken_download_continues(hub: Hub) -> None:
    hub.break_after = 1000
    found = hubs.download("modelscope")
    assert found["train"][0].read_bytes() == FILES[hubs.FILES["train"]]


def test_an_unlisted_file_is_one_line(hub: Hub) -> None:
    hub.files.clear()
    with pytest.raises(NetworkError, match="does not list main/train"):
        hubs.download("modelscope")


def test_no_server_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "http://127.0.0.1:1")
    with pytest.raises(NetworkError, match="no connection") as caught:
        hubs.download("modelscope")
    assert "--local" in caught.value.fix
    assert "\n" not in caught.value.message
