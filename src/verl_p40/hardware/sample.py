"""What one look at one GPU gives, whatever it was read with."""

from __future__ import annotations

from dataclasses import dataclass

THROTTLE_REASONS: tuple[tuple[int, str], ...] = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
    (0x200, "board_limit"),
    (0x400, "reliability"),
)
"""Bit and word of each reason for reduced clocks. Source: ``nvmlClocksThrottleReason*`` in NVML's
API reference (``nvmlClocksEventReason*`` since R535), the words as nvidia-smi's fields have them."""

ALARMING = frozenset(
    {
        "hw_slowdown",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "reliability",
    }
)
"""The reasons that mean something is wrong (heat, power), unlike idling or the power cap."""


def throttle_words(mask: int) -> tuple[str, ...]:
    """The words of a bit mask; bits that NVML has added since are given in hex."""
    words = [word for bit, word in THROTTLE_REASONS if mask & bit]
    unknown = mask & ~sum(bit for bit, _ in THROTTLE_REASONS)
    return (*words, hex(unknown)) if unknown else tuple(words)


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU. ``memory_mib`` is None where the driver does not say."""

    pid: int
    memory_mib: int | None


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one time. None stands for what the card or the driver does not report.

    ``utilization_percent`` is the share of the driver's last sampling period (1/6 to 1 s) in which
    a kernel ran, ``memory_utilization_percent`` that in which memory was read or written.
    ``memory_used_mib`` leaves out what the driver reserves, as nvidia-smi does since R510.
    ``throttle`` is empty when nothing holds the clocks back; ``processes`` are those that compute,
    with the process ids of the namespace the driver reports them in (the host's).
    """

    index: int
    name: str
    uuid: str = ""
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    fan_percent: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pstate: str | None = None
    throttle: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    processes: tuple[GpuProcess, ...] | None = None

    @property
    def process_memory_mib(self) -> int | None:
        """Memory of all compute processes together; None where the driver does not say."""
        if self.processes is None or any(p.memory_mib is None for p in self.processes):
            return None
        return sum(p.memory_mib or 0 for p in self.processes)


@dataclass(frozen=True)
class Reading:
    """All GPUs at one time, in the order of their indices.

    ``problems`` are GPUs that did not answer, a sentence each ("GPU 0: GPU is lost"). One that has
    answered before has a sample all the same: its name, and None everywhere.
    """

    gpus: tuple[GpuSample, ...]
    problems: tuple[str, ...] = ()
