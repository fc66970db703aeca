"""The real NVML bindings, on a library that answers with what a P40 was seen to answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_replay as replay
import pytest

READ = """
import dataclasses, json
from verl_p40.hardware.reader import NoGpu, open_reader
try:
    reader = open_reader()
except NoGpu as error:
    print(json.dumps({"none": str(error)}))
else:
    reader.read()
    print(json.dumps({"source": reader.source, **dataclasses.asdict(reader.read())}))
    reader.close()
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ``libnvidia-ml.so.1`` built from ``nvml_stub.c``."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    built = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", built, source], check=True)
    return folder


def _read(library: Path | None, tmp_path: Path, **settings: str) -> dict[str, Any]:
    """What a reader gives in a process of its own, with the capture's values in the library."""
    row = {name: value.split()[0] for name, value in replay.p40_row().items() if name != "name"}
    environ = {
        **os.environ,
        "PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(library or tmp_path),
        "NAME": replay.p40_row()["name"],
        "UTILIZATION": row["utilization.gpu"],
        "MEMORY_UTILIZATION": row["utilization.memory"],
        "MEMORY_USED": row["memory.used"],
        "MEMORY_TOTAL": row["memory.total"],
        "MEMORY_RESERVED": "200",
        "POWER_MW": str(int(float(row["power.draw"]) * 1000)),
        "POWER_LIMIT_MW": str(int(float(row["enforced.power.limit"]) * 1000)),
        "TEMPERATURE": row["temperature.gpu"],
        "SM_CLOCK": row["clocks.current.sm"],
        "MEMORY_CLOCK": row["clocks.current.memory"],
        "PSTATE": row["pstate"].removeprefix("P"),
        "THROTTLE": row["clocks_throttle_reasons.active"],
        "PCIE_GENERATION": row["pcie.link.gen.current"],
        "PCIE_WIDTH": row["pcie.link.width.current"],
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-c", READ], env=environ, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_a_p40_reads_the_same_through_nvml_as_through_nvidia_smi(
    library: Path, tmp_path: Path
) -> None:
    apps = [
        {"gpu_uuid": replay.p40_row()["uuid"], "pid": pid, "used_gpu_memory": f"{size} MiB"}
        for pid, size in (("4242", "14000"), ("4243", "640"))
    ]
    nvml = _read(library, tmp_path)
    assert nvml.pop("source") == "NVML"
    replay.nvidia_smi(tmp_path, [replay.p40_row()], apps)
    smi = _read(None, tmp_path)
    assert smi.pop("source") == "nvidia-smi"
    assert nvml == smi
    (gpu,) = nvml["gpus"]
    assert gpu["fan_percent"] is None
    assert gpu["throttle"] == ["sw_power_cap"]


def test_drivers_before_r510_count_what_they_reserve_as_used(library: Path, tmp_path: Path) -> None:
    (gpu,) = _read(library, tmp_path, STUB_OLD="1")["gpus"]
    assert gpu["memory_used_mib"] == 54 + 200
    assert [process["pid"] for process in gpu["processes"]] == [4242, 4243]


def test_a_gpu_that_is_lost_keeps_its_name_and_is_told(library: Path, tmp_path: Path) -> None:
    reading = _read(library, tmp_path, STUB_ERROR="15")
    assert reading["problems"] == ["GPU 0: GPU is lost"]
    (gpu,) = reading["gpus"]
    assert gpu["name"] == "Tesla P40"
    assert gpu["temperature_c"] is None
    assert gpu["processes"] is None


def test_without_a_driver_both_reasons_are_told(library: Path, tmp_path: Path) -> None:
    none = _read(library, tmp_path, STUB_INIT="9")["none"]
    assert none == "NVML: Driver Not Loaded; there is no nvidia-smi on PATH"
    assert "Shared Library Not Found" in _read(None, tmp_path)["none"]
