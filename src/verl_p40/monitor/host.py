"""The machine: processors, memory, disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class HostSample:
    """The machine at one time. Memory and disk in bytes.

    In a container too these are the whole machine's. ``cpu_percent`` is the mean of all cores
    since the sample before (100 is all of them busy), None in the first.
    """

    cpu_percent: float | None
    load_1m: float
    cores: int
    ram_used: int
    ram_available: int
    ram_total: int
    swap_used: int
    disk_free: int | None


class Host:
    """Samples the machine. ``runs_dir``'s file system is the disk that is looked at."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._cores = psutil.cpu_count() or 1
        self._first = True

    def sample(self) -> HostSample:
        cpu = psutil.cpu_percent(interval=None)
        memory = psutil.virtual_memory()
        sample = HostSample(
            cpu_percent=None if self._first else cpu,
            load_1m=os.getloadavg()[0],
            cores=self._cores,
            ram_used=memory.total - memory.available,
            ram_available=memory.available,
            ram_total=memory.total,
            swap_used=psutil.swap_memory().used,
            disk_free=_free(self._runs_dir),
        )
        self._first = False
        return sample


def shared_memory_used(root: int | None = None) -> int | None:
    """Bytes used of ``/dev/shm``: of process ``root``'s, which may be another container's.

    None where it cannot be looked at.
    """
    path = "/dev/shm" if root is None else f"/proc/{root}/root/dev/shm"
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def _free(path: Path) -> int | None:
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize
