"""The CUDA devices of this machine as the driver shows them. Loads no toolkit and no torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_MAJOR, _MINOR = 75, 76
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}`` of cuda.h."""


@dataclass(frozen=True)
class Card:
    """Compute capability, and memory in bytes."""

    capability: tuple[int, int]
    memory: int


def cards() -> list[Card]:
    """Every device that ``CUDA_VISIBLE_DEVICES`` leaves; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_card(driver, ordinal) for ordinal in range(count.value)]


def _card(driver: ctypes.CDLL, ordinal: int) -> Card:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory = ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return Card((major.value, minor.value), memory.value)
