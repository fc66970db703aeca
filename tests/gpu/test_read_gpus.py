"""On any machine with an NVIDIA GPU: NVML and nvidia-smi tell the same, and all of it is sane."""

from __future__ import annotations

import shutil
import time

import pytest

from verl_p40.hardware.nvml import NvmlReader, NvmlUnavailable
from verl_p40.hardware.reader import open_reader
from verl_p40.hardware.smi import SmiReader

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def nvml() -> NvmlReader:
    try:
        return NvmlReader()
    except NvmlUnavailable as error:
        pytest.skip(f"no NVIDIA GPU here: {error}")


def test_the_first_choice_is_nvml(nvml: NvmlReader) -> None:
    reader = open_reader()
    assert reader.source == "NVML"
    reader.close()


def test_every_gpu_answers_within_its_limits(nvml: NvmlReader) -> None:
    reading = nvml.read()
    assert reading.problems == ()
    assert reading.gpus
    for gpu in reading.gpus:
        assert gpu.name
        assert gpu.memory_used_mib is not None
        assert gpu.memory_total_mib is not None
        assert 0 <= gpu.memory_used_mib < gpu.memory_total_mib
        assert gpu.temperature_c is not None
        assert 5 < gpu.temperature_c < 110
        assert gpu.power_w is None or 1 < gpu.power_w < 2000
        assert gpu.throttle is not None
        assert gpu.pstate is not None
        assert gpu.pcie_width in (1, 2, 4, 8, 16)


def test_nvidia_smi_tells_the_same(nvml: NvmlReader) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi here")
    ours, theirs = nvml.read().gpus, SmiReader().read().gpus
    for one, other in zip(ours, theirs, strict=True):
        assert (one.index, one.name, one.uuid) == (other.index, other.name, other.uuid)
        assert one.memory_total_mib == pytest.approx(other.memory_total_mib, abs=1)
        assert one.memory_used_mib == pytest.approx(other.memory_used_mib, abs=64)
        assert one.temperature_c == pytest.approx(other.temperature_c, abs=5)
        assert one.power_limit_w == pytest.approx(other.power_limit_w, abs=1)
        assert (one.fan_percent is None) == (other.fan_percent is None)
        assert one.pcie_width == other.pcie_width


def test_a_sample_costs_little(nvml: NvmlReader) -> None:
    nvml.read()
    began = time.process_time()
    for _ in range(50):
        nvml.read()
    each = (time.process_time() - began) / 50
    print(f"{1000 * each:.2f} ms of CPU a sample of {len(nvml.read().gpus)} GPUs")
    assert each < 0.05
