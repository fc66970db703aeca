"""Samples through the ``nvidia-smi`` program, where NVML's Python bindings cannot be used."""

from __future__ import annotations

import contextlib
import csv
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from verl_p40.hardware.sample import GpuProcess, GpuSample, Reading, throttle_words

FIELDS = (
    "index",
    "name",
    "uuid",
    "utilization.gpu",
    "utilization.memory",
    "memory.used",
    "memory.total",
    "power.draw",
    "enforced.power.limit",
    "temperature.gpu",
    "fan.speed",
    "clocks.current.sm",
    "clocks.current.memory",
    "pstate",
    # Drivers from R535 on know it as clocks_event_reasons.active too.
    "clocks_throttle_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)
"""What is asked of ``nvidia-smi --query-gpu``."""

RENAMED = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}
"""The newer name of a field, for the day a driver drops the older one."""

APP_FIELDS = ("gpu_uuid", "pid", "used_gpu_memory")
TIMEOUT = 10.0
"""Seconds after which nvidia-smi is taken to hang, as it does on a GPU that fell off the bus."""

_INVALID_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_NUMBER = re.compile(r"^-?\d+(\.\d+)?")


class SmiUnavailable(Exception):
    """nvidia-smi is not there, or sees no GPU; the text says why."""


class SmiReader:
    """Starts ``nvidia-smi`` twice a sample: GPUs, then the processes that compute on them.

    Args:
        program: the path of nvidia-smi; looked up on PATH when it is None.
        cancelled: asked while nvidia-smi runs; once it says True the program is ended.

    Raises:
        SmiUnavailable: there is no nvidia-smi, or its first answer holds no GPU.
    """

    source = "nvidia-smi"

    def __init__(
        self, program: str | None = None, *, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        found = program or shutil.which("nvidia-smi")
        if found is None:
            raise SmiUnavailable("there is no nvidia-smi on PATH")
        self._program, self._cancelled = found, cancelled
        self._fields = list(FIELDS)
        self._known: dict[int, GpuSample] = {}
        first = self.read()
        if not first.gpus:
            raise SmiUnavailable("; ".join(first.problems) or "nvidia-smi lists no GPU")

    def read(self) -> Reading:
        """One sample of each GPU. Never raises: what does not answer is None, or a problem."""
        code, out = self._query("--query-gpu", self._fields)
        while code and (invalid := _INVALID_FIELD.search(out)) and self._drop(invalid.group(1)):
            code, out = self._query("--query-gpu", self._fields)
        gpus, problems = parse_gpus(out, self._fields)
        if not gpus and not problems:
            problems = [f"nvidia-smi: {_last_line(out) or f'exit code {code}'}"]
        answered = {gpu.index for gpu in gpus}
        for gpu in gpus:
            self._known[gpu.index] = GpuSample(gpu.index, gpu.name, gpu.uuid)
        gpus += [known for index, known in self._known.items() if index not in answered]
        if answered:
            gpus = _with_processes(gpus, *self._query("--query-compute-apps", APP_FIELDS))
        return Reading(tuple(sorted(gpus, key=lambda gpu: gpu.index)), tuple(problems))

    def close(self) -> None:
        """Nothing is held open."""

    def _drop(self, field: str) -> bool:
        """Ask for the newer name of a field this nvidia-smi does not know, or no more for it."""
        if field not in self._fields:
            return False
        place = self._fields.index(field)
        self._fields[place : place + 1] = [RENAMED[field]] if field in RENAMED else []
        return True

    def _query(self, what: str, fields: Sequence[str]) -> tuple[int, str]:
        command = [self._program, f"{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            return 1, f"cannot be started: {error.strerror}"
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                out, _ = child.communicate(timeout=0.1)
                return child.returncode, out
            except subprocess.TimeoutExpired:
                if not self._cancelled() and time.monotonic() < deadline:
                    continue
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # One that hangs in the driver does not even die of this: it is left behind.
                child.communicate(timeout=0.2)
            return 1, f"no answer in {TIMEOUT:.0f} s"


def parse_gpus(text: str, fields: Sequence[str]) -> tuple[list[GpuSample], list[str]]:
    """The samples in the output of ``--query-gpu``, and its lines that are none of them.

    Args:
        text: CSV without a header, with or without units.
        fields: what was asked for, in order; ``index`` and ``name`` among it.
    """
    gpus, problems = [], []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        cells = dict(zip(fields, (cell.strip() for cell in row), strict=False))
        if len(row) == len(fields) and cells["index"].isdigit():
            gpus.append(_sample(cells))
        elif any(row) and not all(_INVALID_FIELD.search(cell) for cell in row):
            problems.append(", ".join(row))
    return gpus, problems


def _sample(cells: Mapping[str, str]) -> GpuSample:
    def number(field: str) -> float | None:
        # "97", "97 %" or "178.25 W"; "[N/A]", "[Not Supported]", "[GPU requires reset]"...
        found = _NUMBER.match(cells.get(field, ""))
        return float(found.group()) if found else None

    def whole(field: str) -> int | None:
        value = number(field)
        return None if value is None else int(value)

    pstate = cells.get("pstate", "")
    return GpuSample(
        index=int(cells["index"]),
        name=cells["name"],
        uuid=cells.get("uuid", ""),
        utilization_percent=number("utilization.gpu"),
        memory_utilization_percent=number("utilization.memory"),
        memory_used_mib=number("memory.used"),
        memory_total_mib=number("memory.total"),
        power_w=number("power.draw"),
        power_limit_w=number("enforced.power.limit"),
        temperature_c=number("temperature.gpu"),
        fan_percent=number("fan.speed"),
        sm_clock_mhz=number("clocks.current.sm"),
        memory_clock_mhz=number("clocks.current.memory"),
        pstate=pstate if re.fullmatch(r"P\d+", pstate) else None,
        throttle=_throttle(cells),
        pcie_generation=whole("pcie.link.gen.current"),
        pcie_width=whole("pcie.link.width.current"),
    )


def _throttle(cells: Mapping[str, str]) -> tuple[str, ...] | None:
    for field in ("clocks_throttle_reasons.active", "clocks_event_reasons.active"):
        mask = cells.get(field, "")
        if mask.startswith("0x"):
            return throttle_words(int(mask, 16))
    return None


def _with_processes(gpus: list[GpuSample], code: int, text: str) -> list[GpuSample]:
    """The samples with the processes that ``--query-compute-apps`` printed; alike on an error."""
    if code:
        return gpus
    by_uuid: dict[str, list[GpuProcess]] = {gpu.uuid: [] for gpu in gpus}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(APP_FIELDS) and row[1].isdigit() and row[0] in by_uuid:
            used = _NUMBER.match(row[2])
            process = GpuProcess(int(row[1]), int(float(used.group())) if used else None)
            by_uuid[row[0]].append(process)
    return [replace(gpu, processes=tuple(by_uuid[gpu.uuid])) for gpu in gpus]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
