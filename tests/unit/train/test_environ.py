"""The environment of the trainer, and what is known of room before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_p40.errors import MachineError, UsageError
from verl_p40.hardware import cudadriver
from verl_p40.hardware.cards import Card
from verl_p40.train import environ, room
from verl_p40.train.compose import compose
from verl_p40.train.folder import RunFolder

P40 = Card((6, 1), 22_912 * 2**20)


def _set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, count: int, iommu: bool = False,
    card: Card = P40, device: str = "cuda", rollout: str = "hf", maps: bool = True,
) -> dict[str, str]:  # fmt: skip
    groups = tmp_path / "iommu_groups"
    groups.mkdir()
    if iommu:
        (groups / "0").mkdir()
    monkeypatch.setattr(environ, "_IOMMU", groups)
    monkeypatch.setattr(environ, "cards", lambda: [card] * count)
    monkeypatch.setattr(environ, "maps_memory", lambda: maps)
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    about: Any = type("About", (), {"env": {}})
    run = RunFolder(tmp_path / "run")
    return environ.additions(
        about, run, ray_tmp=tmp_path, chained=None, device=device, count=count, rollout=rollout
    )


def test_one_card_needs_no_word_on_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _set(tmp_path, monkeypatch, count=1, iommu=True)
    assert not any(name.startswith("NCCL") for name in found)
    assert found["TENSORBOARD_DIR"] == str(tmp_path / "run" / "tensorboard")


@pytest.mark.parametrize(
    ("rollout", "maps", "allocator"),
    [
        ("hf", True, "expandable_segments:True"),
        ("hf", False, "max_split_size_mb:128"),
        ("vllm", True, "max_split_size_mb:128"),
    ],
)
def test_segments_grow_where_the_card_and_the_rollout_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: str, maps: bool, allocator: str
) -> None:
    found = _set(tmp_path, monkeypatch, count=1, rollout=rollout, maps=maps)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == allocator


def test_growing_segments_with_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    environ.check_allocator("hf")
    with pytest.raises(UsageError, match="sleep mode"):
        environ.check_allocator("vllm")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    environ.check_allocator("vllm")


def test_no_driver_maps_nothing() -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    assert cudadriver.maps_memory() is False


@pytest.mark.parametrize(
    ("iommu", "capability", "disabled"),
    [(True, (6, 1), True), (False, (6, 1), False), (True, (6, 0), False), (True, (9, 0), False)],
)
def test_peer_writes_are_left_out_where_they_may_hang(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    iommu: bool,
    capability: tuple[int, int],
    disabled: bool,
) -> None:
    card = Card(capability, P40.memory)
    found = _set(tmp_path, monkeypatch, count=2, iommu=iommu, card=card)
    assert found["NCCL_IB_DISABLE"] == "1"
    assert ("NCCL_P2P_DISABLE" in found) == disabled


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in _set(tmp_path, monkeypatch, count=1)


@pytest.fixture(scope="module")
def ppo(verl_config: Path) -> dict[str, Any]:
    return compose("p40-ppo", (), verl_config).config


def _host(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    memory = type("Memory", (), {"total": total, "available": available})
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(room, "_cgroup_limit", lambda: None)


def test_a_run_that_fits(ppo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "cards", lambda: [P40])
    _host(monkeypatch, 64 << 30, 60 << 30)
    assert room.check_room(ppo, "p40-ppo") == []


def test_a_card_that_is_too_small_is_refused_with_what_would_fit(
    ppo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _host(monkeypatch, 64 << 30, 60 << 30)
    monkeypatch.setattr(room, "cards", lambda: [P40, Card((6, 1), 12 << 30)])
    with pytest.raises(
        MachineError, match=r"of the card's 12.0 GiB, in the phase actor update"
    ) as no:
        room.check_room(ppo, "p40-ppo")
    assert "=" in no.value.fix
    monkeypatch.setattr(room, "cards", lambda: [Card((6, 1), 155 * 2**30 // 10)])
    (warning,) = room.check_room(ppo, "p40-ppo")
    assert warning.endswith("it may just fit")


def test_host_memory_is_looked_at_too(ppo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "cards", lambda: [P40])
    _host(monkeypatch, 8 << 30, 7 << 30)
    with pytest.raises(MachineError, match=r"of host memory, and this machine .* has 8.0 GiB"):
        room.check_room(ppo, "p40-ppo")
    _host(monkeypatch, 64 << 30, 7 << 30)
    (warning,) = room.check_room(ppo, "p40-ppo")
    assert "7.0 GiB are free now" in warning


def test_a_model_without_a_plan_is_a_warning(
    ppo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**ppo, "actor_rollout_ref": {**ppo["actor_rollout_ref"], "model": {"path": "me/new"}}}
    (warning,) = room.check_room(other, "mine")
    assert warning.startswith("its memory cannot be planned: no config of me/new")
