"""Samples through NVML, the driver's own library (the ``pynvml`` module of nvidia-ml-py)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from verl_p40.hardware.sample import GpuProcess, GpuSample, Reading, throttle_words

_MIB = 1024 * 1024
_PSTATE_UNKNOWN = 32


class NvmlUnavailable(Exception):
    """NVML cannot be used here; the text says why."""


class NvmlReader:
    """Holds NVML open and reads every GPU through it.

    Raises:
        NvmlUnavailable: nvidia-ml-py is not installed, or the driver is not there or refuses.
    """

    source = "NVML"

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlUnavailable("the package nvidia-ml-py is not installed") from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NvmlUnavailable(f"NVML: {error}") from error
        self._known: dict[int, tuple[Any, str, str]] = {}
        self._unsupported: set[tuple[Any, ...]] = set()
        mismatch = getattr(self._nvml, "NVMLLibraryMismatchError", None)
        self._never = (
            self._nvml.NVMLError_NotSupported,
            self._nvml.NVMLError_FunctionNotFound,
            AttributeError,
            *([mismatch] if mismatch else []),
        )

    def read(self) -> Reading:
        """One sample of each GPU. Never raises: what does not answer is None, or a problem."""
        nvml = self._nvml
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            lost = [GpuSample(i, name, uuid) for i, (_, name, uuid) in sorted(self._known.items())]
            return Reading(tuple(lost), (f"NVML: {error}",))
        gpus, problems = [], []
        for index in sorted({*range(count), *self._known}):
            sample, problem = self._gpu(index)
            if sample is not None:
                gpus.append(sample)
            if problem:
                problems.append(f"GPU {index}: {problem}")
        return Reading(tuple(gpus), tuple(problems))

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return

    def _gpu(self, index: int) -> tuple[GpuSample | None, str]:
        nvml = self._nvml
        if index not in self._known:
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
            except nvml.NVMLError as error:
                return None, str(error)
            self._known[index] = (handle, _text(name), _text(uuid))
        handle, name, uuid = self._known[index]
        failures: list[str] = []

        def ask(function: str, *arguments: Any) -> Any:
            key = (index, function, *arguments)
            if key in self._unsupported:
                return None
            try:
                return getattr(nvml, function)(handle, *arguments)
            except self._never:
                # A property of card, driver or bindings: it need not be asked for every second.
                self._unsupported.add(key)
            except nvml.NVMLError as error:
                failures.append(str(error))
            return None

        rates = ask("nvmlDeviceGetUtilizationRates")
        # The second version leaves out what the driver reserves; drivers before R510 lack it.
        memory = _first(
            ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None)),
            lambda: ask("nvmlDeviceGetMemoryInfo"),
        )
        pstate = ask("nvmlDeviceGetPerformanceState")
        mask = _first(
            ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
            lambda: ask("nvmlDeviceGetCurrentClocksEventReasons"),
        )
        running = _first(
            ask("nvmlDeviceGetComputeRunningProcesses"),
            lambda: ask("nvmlDeviceGetComputeRunningProcesses_v2"),
        )
        # NVML means to drop the first in CUDA 14; drivers before R570 lack the second.
        temperature = _first(
            ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            lambda: ask("nvmlDeviceGetTemperatureV", nvml.NVML_TEMPERATURE_GPU),
        )
        sample = GpuSample(
            index=index,
            name=name,
            uuid=uuid,
            utilization_percent=None if rates is None else float(rates.gpu),
            memory_utilization_percent=None if rates is None else float(rates.memory),
            memory_used_mib=None if memory is None else memory.used / _MIB,
            memory_total_mib=None if memory is None else memory.total / _MIB,
            power_w=_watts(ask("nvmlDeviceGetPowerUsage")),
            power_limit_w=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
            temperature_c=_number(temperature),
            fan_percent=_number(ask("nvmlDeviceGetFanSpeed")),
            sm_clock_mhz=_number(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=_number(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)),
            pstate=None if pstate in (None, _PSTATE_UNKNOWN) else f"P{pstate}",
            throttle=None if mask is None else throttle_words(int(mask)),
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            processes=None if running is None else _processes(running),
        )
        silent = rates is None and memory is None and temperature is None
        return sample, failures[0] if failures and silent else ""


def _first(value: Any, other: Callable[[], Any]) -> Any:
    return other() if value is None else value


def _processes(running: Any) -> tuple[GpuProcess, ...]:
    out = []
    for process in running:
        used = process.usedGpuMemory
        out.append(GpuProcess(int(process.pid), None if used is None else int(used) // _MIB))
    return tuple(out)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else float(milliwatts) / 1000


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
