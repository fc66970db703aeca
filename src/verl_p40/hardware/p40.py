"""The Tesla P40 as a set of numbers, each with where it comes from.

Captures named below are of real cards, from public repositories and kept (without serial numbers)
in ``tests/unit/hardware/captures``. Nothing here has been measured by us on a physical P40.
"""

from __future__ import annotations

from dataclasses import dataclass

_BRIEF = "NVIDIA, Tesla P40 product brief PB-08338-001"
_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
_Q535 = "nvidia-smi -q of a P40, driver 535.129.03, ECC off (captures/p40-q-535.129.03.txt)"


@dataclass(frozen=True)
class GpuProfile:
    """Limits of a GPU model. Memory in MiB (2**20 bytes), power in W, temperature in Celsius."""

    name: str
    pci_device: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    """Bytes of shared memory a block can have, static and dynamic together."""
    shared_memory_per_multiprocessor: int
    memory_mib_ecc_on: tuple[int, int]
    """What the driver reports as total, from older drivers to newer ones."""
    memory_mib_ecc_off: tuple[int, int]
    memory_bandwidth_gb_s: float
    fp32_tflops: float
    """At the boost clock: 2 x cores x clock."""
    fp16_rate: float
    """Of FP32's rate. It has FP16; it is no use."""
    fp64_rate: float
    power_limit_w: float
    power_limit_min_w: float
    sm_clock_base_mhz: int
    sm_clock_max_mhz: int
    memory_clock_mhz: int
    slowdown_c: int
    """From here on the card lowers its clocks (``hw_thermal_slowdown``)."""
    shutdown_c: int
    pcie: tuple[int, int]
    """Generation and lanes."""
    has_fan: bool
    last_driver_branch: int
    sources: tuple[tuple[str, str], ...]
    """Field and where its value comes from, one for every field."""

    def matches(self, name: str) -> bool:
        """True for this model's name as NVML or nvidia-smi gives it."""
        return self.name.lower() in name.lower()


P40 = GpuProfile(
    name="Tesla P40",
    pci_device=0x1B38,
    compute_capability=(6, 1),
    multiprocessors=30,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_multiprocessor=96 * 1024,
    memory_mib_ecc_on=(22_912, 23_040),
    memory_mib_ecc_off=(24_451, 24_576),
    memory_bandwidth_gb_s=346.0,
    fp32_tflops=11.76,
    fp16_rate=1 / 64,
    fp64_rate=1 / 32,
    power_limit_w=250.0,
    power_limit_min_w=125.0,
    sm_clock_base_mhz=1303,
    sm_clock_max_mhz=1531,
    memory_clock_mhz=3615,
    slowdown_c=92,
    shutdown_c=95,
    pcie=(3, 16),
    has_fan=False,
    last_driver_branch=580,
    sources=(
        ("name", _Q535),
        ("pci_device", _Q535),
        ("compute_capability", "NVIDIA, CUDA GPUs list"),
        (
            "multiprocessors",
            "3,840 cores (product brief) at 128 a multiprocessor (programming guide)",
        ),
        ("shared_memory_per_block", _GUIDE),
        ("shared_memory_per_multiprocessor", _GUIDE),
        (
            "memory_mib_ecc_on",
            "nvidia-smi: 22,912 under driver 375, 22,919 under 390 to 440, 23,040 under 550 "
            "(captures/p40-tables.csv)",
        ),
        (
            "memory_mib_ecc_off",
            "nvidia-smi: 24,451 under driver 410, 24,576 under 535 and 545, which count what the "
            "driver reserves (captures/p40-tables.csv)",
        ),
        ("memory_bandwidth_gb_s", "NVIDIA, Tesla P40 data sheet"),
        ("fp32_tflops", "2 x 3,840 x 1.531 GHz; NVIDIA's data sheet rounds to 12"),
        ("fp16_rate", _GUIDE),
        ("fp64_rate", _GUIDE),
        ("power_limit_w", _Q535),
        ("power_limit_min_w", _Q535),
        ("sm_clock_base_mhz", _Q535),
        ("sm_clock_max_mhz", _Q535),
        ("memory_clock_mhz", _Q535),
        ("slowdown_c", _Q535),
        ("shutdown_c", _Q535),
        ("pcie", _Q535),
        ("has_fan", f"{_BRIEF} (passively cooled); fan speed N/A in every capture"),
        ("last_driver_branch", "NVIDIA, support of Maxwell, Pascal and Volta ends with R580"),
    ),
)
"""The card this project is for."""

PROFILES = (P40,)


def profile_of(name: str) -> GpuProfile | None:
    """The profile of a model by the name that NVML or nvidia-smi gives; None for one unknown."""
    return next((profile for profile in PROFILES if profile.matches(name)), None)
