"""Everything at one time, as it is written and shown."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from verl_p40.hardware.sample import GpuSample
from verl_p40.monitor.finder import Active
from verl_p40.monitor.host import HostSample
from verl_p40.monitor.progress import RunState
from verl_p40.monitor.tree import TreeSample


@dataclass(frozen=True)
class Sample:
    """One sample.

    ``shm_used`` is in bytes: ``/dev/shm`` as the run's processes have it, the monitor's own while
    there is no run, None while the run's cannot be looked at. ``hidden`` says why there is no
    ``tree`` although there is a run.
    """

    time: datetime
    active: Active | None
    run: RunState | None
    gpus: tuple[GpuSample, ...]
    host: HostSample
    tree: TreeSample | None
    shm_used: int | None
    hidden: str = ""


def iso(moment: datetime) -> str:
    """UTC with milliseconds: ``2025-07-01T12:00:00.123Z``."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
