from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from verl_p40.train import checkpoints


def _archive(path: Path) -> None:
    """What torch.save writes is a zip archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)


def _checkpoint(folder: Path, step: int, *, world: int = 1, critic: bool = True) -> Path:
    place = folder / f"global_step_{step}"
    for model in ["actor", *(["critic"] if critic else [])]:
        for what in ("model", "optim", "extra_state"):
            for rank in range(world):
                _archive(place / model / f"{what}_world_size_{world}_rank_{rank}.pt")
    _archive(place / "data.pt")
    return place


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    place = _checkpoint(tmp_path, 10, world=2)
    assert checkpoints.is_whole(place, critic=True)
    assert checkpoints.newest(tmp_path, critic=True) == 10


@pytest.mark.parametrize(
    "missing",
    [
        "data.pt",
        "critic/model_world_size_2_rank_0.pt",
        "actor/optim_world_size_2_rank_1.pt",
    ],
)
def test_a_missing_or_cut_off_file_makes_it_half_written(tmp_path: Path, missing: str) -> None:
    _checkpoint(tmp_path, 10, world=2)
    place = _checkpoint(tmp_path, 20, world=2)
    whole = (place / missing).read_bytes()
    (place / missing).write_bytes(whole[: len(whole) // 2])
    assert checkpoints.newest(tmp_path, critic=True) == 10
    (place / missing).unlink()
    assert checkpoints.newest(tmp_path, critic=True) == 10
    (place / missing).write_bytes(whole)
    assert checkpoints.newest(tmp_path, critic=True) == 20


def test_without_a_critic_none_is_wanted(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 5, critic=False)
    assert checkpoints.newest(tmp_path, critic=False) == 5
    assert checkpoints.newest(tmp_path, critic=True) is None


@pytest.mark.parametrize("content", ["", "x", "7\n"])
def test_the_tracker_is_made_to_name_the_step(tmp_path: Path, content: str) -> None:
    _checkpoint(tmp_path, 10)
    (tmp_path / checkpoints.TRACKER).write_text(content)
    assert checkpoints.prepare_resume(tmp_path, 10, keep=None) == []
    assert checkpoints.tracked(tmp_path) == 10


def test_half_written_and_surplus_folders_go(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        _checkpoint(tmp_path, step)
    (tmp_path / "global_step_40").mkdir()
    (tmp_path / "global_step_x").mkdir()
    assert checkpoints.prepare_resume(tmp_path, 30, keep=2) == [10, 40]
    assert checkpoints.steps(tmp_path) == [20, 30]
    assert (tmp_path / "global_step_x").is_dir()


def test_starting_over_forgets_the_tracker(tmp_path: Path) -> None:
    (tmp_path / "global_step_2" / "actor").mkdir(parents=True)
    (tmp_path / checkpoints.TRACKER).write_text("2")
    checkpoints.prepare_resume(tmp_path, None, keep=2)
    assert checkpoints.steps(tmp_path) == []
    assert checkpoints.tracked(tmp_path) is None
    checkpoints.prepare_resume(tmp_path / "absent", None, keep=2)


def test_husks_of_deleted_checkpoints_go(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 30)
    _archive(tmp_path / "global_step_10" / "data.pt")
    (tmp_path / "global_step_40" / "actor").mkdir(parents=True)
    (tmp_path / checkpoints.TRACKER).write_text("30")
    checkpoints.remove_husks(tmp_path)
    assert checkpoints.steps(tmp_path) == [30, 40]
