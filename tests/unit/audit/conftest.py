"""The real pinned releases, and verl with the whole patch queue applied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from verl_p40.audit.trees import Tree, open_trees
from verl_p40.patches.queue import load_queue
from verl_p40.patches.release import unpack_pinned
from verl_p40.patches.tree import apply_queue
from verl_p40.stack.fetch import fetch_pinned


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The pinned verl wheel, fetched by its hash (from the cache after the first time)."""
    return fetch_pinned("verl")


@pytest.fixture(scope="session")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pinned verl as it was released."""
    return unpack_pinned("verl", tmp_path_factory.mktemp("unpatched"))


@pytest.fixture(scope="session")
def patched(unpatched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pinned verl and the whole queue applied to it."""
    folder = tmp_path_factory.mktemp("patched") / "site-packages"
    shutil.copytree(unpatched, folder)
    apply_queue(folder, load_queue())
    return folder


@pytest.fixture(scope="session")
def verl(wheel: Path) -> Tree:
    return open_trees(wheel)[0]


@pytest.fixture(scope="session")
def vllm_sdist() -> Path:
    return fetch_pinned("vllm-sdist")
