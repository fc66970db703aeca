"""A folder that cannot be renamed (EXDEV), as in a container image's lower layer."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from verl_p40.patches import swap
from verl_p40.patches.swap import next_folder, previous_folder, recover, swap_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refused(one: Path, other: Path) -> bool:
        raise OSError(errno.EXDEV, "Invalid cross-device link", str(other))

    monkeypatch.setattr(swap, "exchange", refused)
    folder = tmp_path / "verl"
    for place, text in ((folder, "old"), (next_folder(folder), "new")):
        (place / "sub").mkdir(parents=True)
        (place / "sub" / "file.py").write_text(text)
    return folder


def test_it_is_replaced_and_nothing_is_left(folder: Path) -> None:
    swap_in(folder)
    assert (folder / "sub" / "file.py").read_text() == "new"
    assert [path.name for path in folder.parent.iterdir()] == ["verl"]


def test_killed_in_the_removal_the_old_one_comes_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.rmtree

    def dies(path: Path, **options: bool) -> None:
        if path == folder:
            (path / "sub" / "file.py").unlink()
            raise KeyboardInterrupt
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        swap_in(folder)
    monkeypatch.setattr(shutil, "rmtree", real)
    assert previous_folder(folder).is_dir() and next_folder(folder).is_dir()
    assert recover(folder)
    assert (folder / "sub" / "file.py").read_text() == "old"
    assert [path.name for path in folder.parent.iterdir()] == ["verl"]
