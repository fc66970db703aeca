"""Which checkpoints are loaded, and what becomes of those that are not."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest

from verl_p40.train import checkpoints

MODEL = {"model_type": "qwen2", "hidden_size": 64, "vocab_size": 100, "torch_dtype": "float32"}
ALL = ("model", "optim", "extra_state")
WANTED = checkpoints.Expected(
    contents={"actor": ALL, "critic": ALL},
    models={"actor": MODEL, "critic": MODEL},
    world=2,
    versions={"actor": 1, "critic": 1},
)


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
        (place / model / "huggingface").mkdir()
        (place / model / "huggingface" / "config.json").write_text(json.dumps(MODEL))
        fsdp = {"FSDP_version": 1, "world_size": world}
        (place / model / "fsdp_config.json").write_text(json.dumps(fsdp))
    _archive(place / "data.pt")
    return place


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    place = _checkpoint(tmp_path, 10, world=2)
    assert checkpoints.newest(tmp_path, critic=True) == 10
    assert checkpoints.find(tmp_path, WANTED, deep=True) == checkpoints.Found(10)
    (place / "actor" / "extra_state_world_size_2_rank_0.pt").unlink()
    (place / "actor" / "extra_state_world_size_2_rank_1.pt").unlink()
    assert checkpoints.find(tmp_path, WANTED).skipped[0].problem == (
        "actor/extra_state_world_size_*.pt is missing"
    )


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


def _problem(folder: Path, *, deep: bool = False, **other: object) -> tuple[str, bool]:
    found = checkpoints.find(folder, dataclasses.replace(WANTED, **other), deep=deep)
    assert found.step == 10
    (skipped,) = found.skipped
    assert skipped.step == 20
    return skipped.problem, skipped.half


def test_one_of_another_model_is_passed_over(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 10, world=2)
    place = _checkpoint(tmp_path, 20, world=2)
    config = place / "critic" / "huggingface" / "config.json"
    config.write_text(json.dumps({**MODEL, "torch_dtype": "bfloat16"}))
    assert checkpoints.find(tmp_path, WANTED).step == 20
    config.write_text(json.dumps({**MODEL, "hidden_size": 896}))
    assert _problem(tmp_path) == (
        "critic is of another model: hidden_size is 896, and the run's is 64",
        False,
    )


def test_one_of_other_workers_is_passed_over(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 10, world=2)
    place = _checkpoint(tmp_path, 20, world=4)
    assert _problem(tmp_path) == ("actor was saved by 4 workers, and the run has 2", False)
    for model in ("actor", "critic"):
        for path in (place / model).glob("*_world_size_4_rank_[01].pt"):
            path.rename(path.with_name(path.name.replace("size_4", "size_2")))
        for path in (place / model).glob("*_world_size_4_*"):
            path.unlink()
    (place / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2}')
    assert _problem(tmp_path) == ("actor was saved by FSDP 2, and the run has 1", False)


def test_a_flipped_bit_is_found_by_reading_all(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 10, world=2)
    path = _checkpoint(tmp_path, 20, world=2) / "actor" / "model_world_size_2_rank_1.pt"
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"x" * 100) + 50] ^= 1
    path.write_bytes(whole)
    assert checkpoints.find(tmp_path, WANTED).step == 20
    problem, half = _problem(tmp_path, deep=True)
    assert problem == "actor/model_world_size_2_rank_1.pt is damaged (archive/data.pkl)"
    assert not half


def test_what_does_not_fit_is_kept_under_another_name(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        _checkpoint(tmp_path, step)
    (tmp_path / "global_step_40.partial" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_20.set-aside").mkdir()
    checkpoints.prepare_resume(tmp_path, 10, keep=None, aside=[30, 20])
    names = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert names == [
        "global_step_10",
        "global_step_20.set-aside",
        "global_step_20.set-aside-2",
        "global_step_30.set-aside",
    ]
    assert (tmp_path / "global_step_30.set-aside" / "data.pt").is_file()


def test_a_checkpoint_that_is_being_written_is_none(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 10)
    _checkpoint(tmp_path, 20).rename(tmp_path / "global_step_20.partial")
    assert checkpoints.newest(tmp_path, critic=True) == 10


def test_what_is_expected_is_read_from_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    actor = {"strategy": "fsdp2", "checkpoint": {"load_contents": ["model", "optimizer"]}}
    config = {
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
        "actor_rollout_ref": {"model": {"path": str(tmp_path)}, "actor": actor},
    }
    assert checkpoints.expected(config) == checkpoints.Expected(
        contents={"actor": ("model", "optim")},
        models={"actor": MODEL},
        world=2,
        versions={"actor": 2},
    )
