"""Samples made by hand, for what a machine without a GPU cannot take."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_p40.hardware.sample import GpuProcess, GpuSample
from verl_p40.monitor.finder import Active
from verl_p40.monitor.host import HostSample
from verl_p40.monitor.progress import RunState
from verl_p40.monitor.sample import Sample
from verl_p40.monitor.tree import TreeSample
from verl_p40.train.folder import RunFolder

GIB = 1024**3

# A P40 at work, as in captures/p40-tables.csv (driver 418.39): 82 C, 172 W, 22,747 of 22,919 MiB.
P40 = GpuSample(
    index=0,
    name="Tesla P40",
    utilization_percent=100.0,
    memory_utilization_percent=61.0,
    memory_used_mib=22747.0,
    memory_total_mib=22919.0,
    power_w=172.04,
    power_limit_w=250.0,
    temperature_c=82.0,
    sm_clock_mhz=1303.0,
    memory_clock_mhz=3615.0,
    pstate="P0",
    throttle=(),
    pcie_generation=3,
    pcie_width=16,
    processes=(GpuProcess(4242, 22737),),
)

HOST = HostSample(
    cpu_percent=37.5,
    load_1m=1.25,
    cores=2,
    ram_used=6 * GIB,
    ram_available=18 * GIB,
    ram_total=24 * GIB,
    swap_used=0,
    disk_free=40 * GIB,
)

TREE = TreeSample(root=4000, processes=31, rss=4 * GIB, pss=3 * GIB, cpu_percent=174.0)


def sample(run: Path | None = None, **changes: Any) -> Sample:
    """A sample of a P40 at work; of a run in that folder, or of none."""
    active = state = None
    if run is not None:
        active = Active(RunFolder(run), held=True)
        state = RunState(run.name, 12, 60, 0.412, 0.0012, 6.5)
    made = Sample(
        time=datetime(2025, 7, 1, 12, 0, 0, 123456, timezone.utc),
        active=active,
        run=state,
        gpus=(P40,),
        host=HOST,
        tree=TREE if run else None,
        shm_used=GIB // 4,
    )
    return replace(made, **changes)
