"""The real pinned release, a small piece of it, and a queue on that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from patchkit import DEVICE, GSM8K, NEW, TRACKING, QueueMaker, substitute

from verl_p40.patches.release import unpack_pinned


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned wheel, fetched by its hash (from the cache after the first time)."""
    return unpack_pinned("verl", tmp_path_factory.mktemp("release"))


@pytest.fixture
def small(release: Path, tmp_path: Path) -> Path:
    """A tree of six real files, for tests that apply a queue a hundred times."""
    tree = tmp_path / "site-packages"
    names = (GSM8K, TRACKING, DEVICE, "verl/__init__.py", "verl/utils/__init__.py")
    for name in (*names, "verl/version/version"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(release / name, tree / name)
    return tree


@pytest.fixture
def maker(small: Path, tmp_path: Path) -> QueueMaker:
    """A queue of four patches: edits of one file by two of them, an added and a deleted file."""
    maker = QueueMaker(small, tmp_path / "queue")
    maker.add(
        "fix/0001-score.patch",
        {GSM8K: substitute(b"import re\n", b"import re\n\nHOW = 1\n")},
        Description="Say how\n in two lines\n .\n and a paragraph",
    )
    maker.add("fix/0002-new-file.patch", {NEW: b"VALUE = 1\n", "verl/utils/added/empty.py": b""})
    maker.add("p40/0201-more-score.patch", {GSM8K: lambda content: content + b"# no newline"})
    maker.add(
        "p40/0202-less.patch",
        {DEVICE: None, TRACKING: lambda content: content.replace(b"\n", b"\n# more\n", 1)},
        Depends="new-file",
    )
    return maker
