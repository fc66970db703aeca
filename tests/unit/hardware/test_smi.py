"""nvidia-smi's answers, played back from captures of real cards."""

from __future__ import annotations

import time
from pathlib import Path

import gpu_replay as replay
import pytest

from verl_p40.hardware import smi
from verl_p40.hardware.sample import GpuProcess
from verl_p40.hardware.smi import SmiReader, SmiUnavailable


def test_a_p40(tmp_path: Path) -> None:
    reader = SmiReader(str(replay.nvidia_smi(tmp_path, [replay.p40_row()])))
    reading = reader.read()
    assert reading.problems == ()
    (gpu,) = reading.gpus
    assert (gpu.index, gpu.name) == (0, "Tesla P40")
    assert (gpu.memory_used_mib, gpu.memory_total_mib) == (54, 24576)
    assert (gpu.power_w, gpu.power_limit_w, gpu.temperature_c) == (52.5, 250, 69)
    assert (gpu.sm_clock_mhz, gpu.memory_clock_mhz, gpu.pstate) == (544, 3615, "P0")
    assert (gpu.pcie_generation, gpu.pcie_width) == (3, 16)
    assert gpu.throttle == ("sw_power_cap",)
    assert gpu.fan_percent is None
    assert (gpu.processes, gpu.process_memory_mib) == ((), 0)


def test_other_cards_with_and_without_fan_and_in_mig_mode(tmp_path: Path) -> None:
    rows, apps = replay.table("other-cards.csv"), replay.table("l40s-compute-apps.csv")
    apps = [{**row, "used_gpu_memory": row["used_gpu_memory [MiB]"]} for row in apps]
    geforce, busy, mig, l40s = SmiReader(str(replay.nvidia_smi(tmp_path, rows, apps))).read().gpus
    assert (geforce.fan_percent, geforce.utilization_percent) == (38, 0)
    assert busy.throttle == ()
    assert (busy.fan_percent, busy.power_w) == (None, 631.95)
    assert (mig.utilization_percent, mig.memory_used_mib) == (None, 11125)
    assert l40s.processes == (GpuProcess(20037, 538), GpuProcess(20038, 681))
    assert l40s.process_memory_mib == 538 + 681
    assert busy.process_memory_mib == 0


def test_units_do_not_matter() -> None:
    fields = list(replay.p40_row())
    gpus, problems = smi.parse_gpus(", ".join(replay.p40_row().values()), fields)
    assert problems == []
    assert (gpus[0].memory_total_mib, gpus[0].power_w) == (24576, 52.5)


def test_a_driver_without_a_field_is_asked_for_its_new_name_or_not_at_all(tmp_path: Path) -> None:
    row = replay.p40_row()
    row["clocks_event_reasons.active"] = row.pop("clocks_throttle_reasons.active")
    del row["utilization.memory"]
    (gpu,) = SmiReader(str(replay.nvidia_smi(tmp_path, [row]))).read().gpus
    assert gpu.throttle == ("sw_power_cap",)
    assert gpu.memory_utilization_percent is None
    assert gpu.power_w == 52.5


def test_a_gpu_that_fell_off_the_bus_is_a_problem_and_the_other_goes_on(tmp_path: Path) -> None:
    row = replay.p40_row()
    both = [row, {**row, "index": "1", "uuid": "GPU-1"}]
    reader = SmiReader(str(replay.nvidia_smi(tmp_path, both)))
    said = "Unable to determine the device handle for GPU1: 0000:83:00.0: Unknown Error"
    replay.nvidia_smi(tmp_path, [row], complaint=said)
    reading = reader.read()
    assert reading.problems == (said,)
    assert [gpu.temperature_c for gpu in reading.gpus] == [69, None]
    assert reading.gpus[1].name == "Tesla P40"


def test_a_gpu_that_needs_a_reset_has_no_values(tmp_path: Path) -> None:
    row = replay.p40_row()
    lost = dict.fromkeys(row, "[GPU requires reset]") | {"index": "0", "name": "Tesla P40"}
    (gpu,) = SmiReader(str(replay.nvidia_smi(tmp_path, [lost]))).read().gpus
    assert (gpu.temperature_c, gpu.power_w, gpu.pstate, gpu.throttle) == (None,) * 4


def test_no_driver_is_told_in_its_own_words(tmp_path: Path) -> None:
    said = (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running."
    )
    with pytest.raises(SmiUnavailable, match="couldn't communicate with the NVIDIA driver"):
        SmiReader(str(replay.nvidia_smi(tmp_path, [], complaint=said, code=9)))


def test_there_is_none_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SmiUnavailable, match="no nvidia-smi on PATH"):
        SmiReader()


def test_one_that_hangs_is_given_up_when_asked_to_stop(tmp_path: Path) -> None:
    slow = tmp_path / "nvidia-smi"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(SmiUnavailable, match="no answer"):
        SmiReader(str(slow), cancelled=lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 2
