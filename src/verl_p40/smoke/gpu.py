"""What the NVIDIA driver says about the cards, without a CUDA context and without torch.

NVML through nvidia-ml-py where that is installed, else ``nvidia-smi``. A CUDA context would take
300 MiB of a card that a training run may be filling.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_QUERY = "name,uuid,memory.total,memory.used,memory.free,compute_cap,driver_version"
_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One card; memory in MiB. ``uuid`` is used to find the card and never reported."""

    name: str
    uuid: str
    total_mib: int
    used_mib: int
    free_mib: int
    capability: str
    """Compute capability, ``6.1``."""
    computing: int = 0
    """Processes that compute on it, as far as the driver shows them (in a container: none)."""

    def public(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "memory_mib": self.total_mib,
            "used_mib": self.used_mib,
            "compute_capability": self.capability,
        }


@dataclass(frozen=True)
class Seen:
    """What was found. ``driver`` is empty without one; ``problem`` says why nothing was found."""

    driver: str = ""
    cuda: str = ""
    """The newest CUDA that the driver runs, ``12.4``; empty when unknown."""
    gpus: tuple[Gpu, ...] = ()
    source: str = ""
    problem: str = ""

    def first(self) -> Gpu | None:
        """The card that CUDA calls device 0, as far as it can be told."""
        uuid = _first_uuid()
        for gpu in self.gpus:
            if uuid and gpu.uuid == uuid:
                return gpu
        return self.gpus[0] if self.gpus and not uuid else None


def look() -> Seen:
    """Ask NVML, then nvidia-smi; never raises."""
    first = _from_nvml()
    if first.gpus:
        return first
    second = _from_smi()
    return second if second.gpus else first


def _from_nvml() -> Seen:
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Seen(driver=_kernel_driver(), problem="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Seen(driver=_kernel_driver(), source="NVML", problem=_nvml_words(pynvml, error))
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(
                Gpu(
                    name=_text(pynvml.nvmlDeviceGetName(handle)),
                    uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                    total_mib=int(memory.total) // _MIB,
                    used_mib=int(memory.used) // _MIB,
                    free_mib=int(memory.free) // _MIB,
                    capability=f"{major}.{minor}",
                    computing=_computing(pynvml, handle),
                )
            )
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        problem = "" if gpus else "the driver sees no card"
        return Seen(driver, cuda, tuple(gpus), "NVML", problem)
    except pynvml.NVMLError as error:
        return Seen(driver=_kernel_driver(), source="NVML", problem=_nvml_words(pynvml, error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _computing(pynvml: Any, handle: Any) -> int:
    try:
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLError:
        return 0


def _nvml_words(pynvml: Any, error: Any) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver on this machine (libnvidia-ml.so.1 is not there)"
    return f"NVML: {error}"


def _text(value: Any) -> str:
    """Older nvidia-ml-py gives bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _kernel_driver() -> str:
    """The version of the loaded kernel module; empty when there is none."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    numbers = [word for word in line.split() if word.count(".") >= 1 and word[0].isdigit()]
    return numbers[0] if numbers else ""


def _from_smi() -> Seen:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return Seen(driver=_kernel_driver(), problem="no NVIDIA driver on this machine")
    if done.returncode != 0:
        words = " ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}"
        return Seen(driver=_kernel_driver(), source="nvidia-smi", problem=f"nvidia-smi: {words}")
    rows = list(_rows(done.stdout))
    gpus = tuple(gpu for gpu, _ in rows)
    return Seen(rows[0][1] if rows else _kernel_driver(), "", gpus, "nvidia-smi")


def _rows(text: str) -> Iterator[tuple[Gpu, str]]:
    """``(card, driver version)`` of each line of :data:`_QUERY`; odd lines are passed over."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        with contextlib.suppress(ValueError):
            name, uuid, total, used, free, capability, driver = cells
            yield Gpu(name, uuid, int(total), int(used), int(free), capability), driver


def _first_uuid() -> str:
    """``GPU-...`` of CUDA device 0, which CUDA_VISIBLE_DEVICES and its own order decide."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, raw = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
    # CUDA_VISIBLE_DEVICES is read at cuInit, once a process, from the environment of that time.
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return ""
    if driver.cuDeviceGetUuid(raw, device):
        return ""
    digits = bytes(raw).hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


def visible() -> bool:
    """False when CUDA_VISIBLE_DEVICES hides every card."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return value is None or value.strip() not in ("", "-1", "NoDevFiles")
