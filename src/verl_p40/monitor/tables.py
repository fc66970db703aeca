"""The two tables that a run's folder gets: which columns, and how a sample fills them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from verl_p40.hardware.sample import GpuSample
from verl_p40.monitor.csvlog import Cell
from verl_p40.monitor.sample import Sample, iso

GPU_FILE = "gpu.csv"
HOST_FILE = "host.csv"

GPU_COLUMNS: dict[str, str] = {
    "time": "UTC, ISO 8601",
    "index": "the driver's number of the GPU",
    "name": "model",
    "utilization_percent": "share of the driver's last sampling period in which a kernel ran",
    "memory_utilization_percent": "share of it in which memory was read or written",
    "memory_used_mib": "without what the driver reserves",
    "memory_total_mib": "what the driver reports as total: less with ECC on",
    "power_w": "drawn",
    "power_limit_w": "enforced limit",
    "temperature_c": "of the GPU",
    "fan_percent": "empty on a P40, which has no fan",
    "sm_clock_mhz": "clock of the multiprocessors",
    "memory_clock_mhz": "clock of the memory",
    "pstate": "P0 (fastest) to P15",
    "throttle_reasons": "what holds the clocks back, words with a space between; `none`",
    "pcie_generation": "of the link now (it drops when idle)",
    "pcie_width": "lanes of the link now",
    "process_count": "processes that compute on it",
    "process_memory_mib": "their memory together",
}
"""Column of ``gpu.csv`` and what it holds. The unit is in the name; empty means not reported."""

HOST_COLUMNS: dict[str, str] = {
    "time": "UTC, ISO 8601; the same as in gpu.csv",
    "cpu_percent": "mean of all cores since the row before; 100 is all of them busy",
    "load_1m": "load average of one minute",
    "ram_used_bytes": "total less available",
    "ram_available_bytes": "what can be had without swapping",
    "ram_total_bytes": "of the machine",
    "swap_used_bytes": "of the machine",
    "shm_used_bytes": "/dev/shm as the run's processes have it",
    "disk_free_bytes": "on the file system of the run folders, for this user",
    "process_count": "the run's processes",
    "process_rss_bytes": "their resident memory; a shared page counts once a process",
    "process_pss_bytes": "the same, a shared page counted once in all; every 30 s",
    "process_cpu_percent": "since the row before; 100 is one core",
}
"""Column of ``host.csv`` and what it holds. The unit is in the name; empty means not known."""


def gpu_rows(sample: Sample) -> list[list[Cell]]:
    """The rows of ``gpu.csv``, one a GPU."""
    return [[iso(sample.time), *gpu_record(gpu).values()] for gpu in sample.gpus]


def host_rows(sample: Sample) -> list[list[Cell]]:
    """The row of ``host.csv``."""
    return [[iso(sample.time), *host_record(sample).values()]]


def document(sample: Sample) -> dict[str, Any]:
    """A sample for JSON, with the columns' names. None is what is not known."""
    state: dict[str, Any] | None = None
    if sample.run is not None and sample.active is not None:
        state = {"path": str(sample.active.run.path), "held": sample.active.held}
        state |= asdict(sample.run)
    return {
        "time": iso(sample.time),
        "run": state,
        "gpus": [gpu_record(gpu) for gpu in sample.gpus],
        "host": host_record(sample),
        "hidden": sample.hidden or None,
    }


def gpu_record(gpu: GpuSample) -> dict[str, Cell]:
    """A GPU by column, without the time."""
    throttle = None
    if gpu.throttle is not None:
        throttle = " ".join(gpu.throttle) or "none"
    return {
        "index": gpu.index,
        "name": gpu.name,
        "utilization_percent": _short(gpu.utilization_percent),
        "memory_utilization_percent": _short(gpu.memory_utilization_percent),
        "memory_used_mib": _short(gpu.memory_used_mib),
        "memory_total_mib": _short(gpu.memory_total_mib),
        "power_w": _short(gpu.power_w),
        "power_limit_w": _short(gpu.power_limit_w),
        "temperature_c": _short(gpu.temperature_c),
        "fan_percent": _short(gpu.fan_percent),
        "sm_clock_mhz": _short(gpu.sm_clock_mhz),
        "memory_clock_mhz": _short(gpu.memory_clock_mhz),
        "pstate": gpu.pstate,
        "throttle_reasons": throttle,
        "pcie_generation": gpu.pcie_generation,
        "pcie_width": gpu.pcie_width,
        "process_count": None if gpu.processes is None else len(gpu.processes),
        "process_memory_mib": gpu.process_memory_mib,
    }


def host_record(sample: Sample) -> dict[str, Cell]:
    """Machine and processes by column, without the time."""
    host, tree = sample.host, sample.tree
    return {
        "cpu_percent": _short(host.cpu_percent),
        "load_1m": round(host.load_1m, 2),
        "ram_used_bytes": host.ram_used,
        "ram_available_bytes": host.ram_available,
        "ram_total_bytes": host.ram_total,
        "swap_used_bytes": host.swap_used,
        "shm_used_bytes": sample.shm_used,
        "disk_free_bytes": host.disk_free,
        "process_count": tree.processes if tree else None,
        "process_rss_bytes": tree.rss if tree else None,
        "process_pss_bytes": tree.pss if tree else None,
        "process_cpu_percent": _short(tree.cpu_percent) if tree else None,
    }


def _short(value: float | None) -> float | int | None:
    """One decimal, and none where it would be zero."""
    if value is None:
        return None
    rounded = round(value, 1)
    return int(rounded) if rounded == int(rounded) else rounded
