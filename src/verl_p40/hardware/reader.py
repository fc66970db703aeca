"""Whatever can read the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from verl_p40.hardware.nvml import NvmlReader, NvmlUnavailable
from verl_p40.hardware.sample import Reading
from verl_p40.hardware.smi import SmiReader, SmiUnavailable


class Reader(Protocol):
    """Reads all GPUs, again and again."""

    source: str
    """What it reads with, for people."""

    def read(self) -> Reading: ...

    def close(self) -> None: ...


class NoGpu(Exception):
    """No GPU can be read here; the text says what was tried."""


def open_reader(cancelled: Callable[[], bool] = lambda: False) -> Reader:
    """NVML where it works, else nvidia-smi.

    Args:
        cancelled: see :class:`verl_p40.hardware.smi.SmiReader`.

    Raises:
        NoGpu: neither works, or there is no GPU.
    """
    try:
        nvml = NvmlReader()
    except NvmlUnavailable as error:
        try:
            return SmiReader(cancelled=cancelled)
        except SmiUnavailable as other:
            raise NoGpu(f"{error}; {other}") from error
    reading = nvml.read()
    if reading.gpus or reading.problems:
        return nvml
    nvml.close()
    raise NoGpu("the NVIDIA driver is there, but no GPU")
