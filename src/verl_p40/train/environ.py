"""The environment variables that the trainer is started with, each for a reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from verl_p40.errors import UsageError
from verl_p40.hardware.cards import cards
from verl_p40.hardware.cudadriver import maps_memory
from verl_p40.train import stopping
from verl_p40.train.catalog import About
from verl_p40.train.folder import RunFolder

TRIPWIRE_DIR = "VERL_P40_TRIPWIRE_DIR"
"""Where an armed tripwire writes; the run folder."""
TRIPWIRE_CHAIN = "VERL_P40_TRIPWIRE_CHAIN"
"""The external library that the tripwire took the place of, imported by it in turn."""

_REMOVED = (
    # Would attach the run to a cluster of someone else's.
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    # Left by a launcher around us, these would be taken for this run's.
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

_RAY_PATIENCE = {
    # Ray gives its helpers 30 s and its workers 60 s to register, then its node ends itself
    # ("Failed to register worker to Raylet: End of file"). Importing torch from a cold disk on
    # two busy cores takes longer; both limits were met in tests.
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "120000",
}


def additions(
    about: About,
    run: RunFolder,
    *,
    ray_tmp: Path,
    chained: str | None,
    device: str,
    count: int = 1,
    rollout: str = "hf",
) -> dict[str, str]:
    """What is set on top of the caller's environment.

    Args:
        device: ``cpu`` or ``cuda``.
        count: how many cards of this machine are used.
        rollout: ``actor_rollout_ref.rollout.name``.

    The preset's own variables give way to those the user has set; ours do not.
    """
    preset = {k: v.value for k, v in about.env.items() if k not in os.environ}
    defaults = {
        k: v
        for k, v in _defaults(device, count, rollout).items()
        if k not in os.environ and k not in preset
    }
    ours = {
        "VERL_FILE_LOGGER_PATH": str(run.metrics),
        "TENSORBOARD_DIR": str(run.path / "tensorboard"),
        stopping.STOP_FILE: str(stopping.file_in(ray_tmp)),
        "RAY_TMPDIR": str(ray_tmp),
        "RAY_USAGE_STATS_ENABLED": "0",
        **_RAY_PATIENCE,
        # Whole lines of every worker in train.log: none left out, none coloured.
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        TRIPWIRE_DIR: str(run.path),
    }
    if chained:
        ours[TRIPWIRE_CHAIN] = chained
    return {**defaults, **preset, **ours}


def _defaults(device: str, count: int, rollout: str) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    # Ray sets OMP_NUM_THREADS=1 in its workers unless it is set already.
    threads = min(cores, 8) if device == "cpu" else min(cores, 4)
    found = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    room = _shared_memory() * 9 // 10
    if room >= _RAY_LEAST:
        # Ray takes 30 % of the memory for its objects; where /dev/shm is smaller (a container's),
        # it would keep them all on the disk. verl's are a few MB.
        found["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] = str(room)
    if device == "cuda":
        # The HF rollout's cache grows with every token, and the allocator keeps the blocks of all
        # its sizes: 7 GB more than are in use, 2 GB in segments that grow (docs/presets.md).
        # vLLM's sleep mode refuses those; large blocks are then not split.
        grows = rollout == "hf" and maps_memory()
        found["PYTORCH_CUDA_ALLOC_CONF"] = _EXPANDABLE if grows else "max_split_size_mb:128"
    if device == "cuda" and count > 1:
        # One machine: NCCL need not look for InfiniBand, and talks to itself by the loopback,
        # whatever addresses a container's or a VPN's interface has.
        found |= {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        if _p2p_hangs([card.capability for card in cards()]):
            found["NCCL_P2P_DISABLE"] = "1"
    return found


_EXPANDABLE = "expandable_segments:True"
_IOMMU = Path("/sys/kernel/iommu_groups")
_PCIE_ONLY = (6, 1)
"""The capability of P40, P4, Titan X and GTX 10: none of them has NVLink."""


def _p2p_hangs(capabilities: list[tuple[int, int]]) -> bool:
    """Whether one card's writes into another's memory may never arrive.

    With an IOMMU on, PCIe sends them by way of the root complex, "causing a significant
    performance reduction or even a hang" (NCCL's Troubleshooting, "PCI Access Control Services").
    By host memory NCCL is sure to get through; a P40 has no NVLink that would be lost by it.
    """
    try:
        translated = any(_IOMMU.iterdir())
    except OSError:
        translated = False
    return translated and set(capabilities) == {_PCIE_ONLY}


def check_allocator(rollout: str) -> None:
    """Refuse what the user has set and ``CuMemAllocator`` (vllm/device_allocator/cumem.py) asserts.

    Raises:
        UsageError: expandable segments with vLLM, which sleeps between rollouts.
    """
    if rollout == "vllm" and _EXPANDABLE in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise UsageError(
            f"PYTORCH_CUDA_ALLOC_CONF has {_EXPANDABLE}, which vLLM's sleep mode does not take",
            fix="unset PYTORCH_CUDA_ALLOC_CONF",
        )


_RAY_LEAST = 100_000_000
"""Bytes. Ray refuses an object store of less than 75 MiB."""


def _shared_memory() -> int:
    """Bytes free in /dev/shm, 0 where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def apply(base: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The whole environment: ``base`` without what would mislead Ray or verl, plus ``added``."""
    return {**{k: v for k, v in base.items() if k not in _REMOVED}, **added}
