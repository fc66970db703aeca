"""The driver's verdict, and what is read from nvidia-smi."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from verl_p40.smoke import driver, gpu
from verl_p40.smoke.gpu import Gpu, Seen
from verl_p40.smoke.model import Failed, Finding, Skip
from verl_p40.smoke.torchbuild import judge as judge_build
from verl_p40.smoke.torchbuild import runs_on
from verl_p40.stack import pins

CUDA = pins.load().cuda
P40 = Gpu("Tesla P40", "GPU-1", 22912, 0, 22912, "6.1")


def judge(version: str, *, cards: tuple[Gpu, ...] = (P40,), problem: str = "") -> Finding:
    return driver.judge(Seen(version, "12.2", cards, "NVML", problem), CUDA)


def test_a_right_driver() -> None:
    found = judge("535.129.03")
    assert found.text == "driver 535.129.03 (R535): Tesla P40 (sm_61)"
    assert found.details["gpus"][0]["compute_capability"] == "6.1"
    assert "GPU-1" not in str(found)


def test_the_last_pascal_branch_is_fine_and_a_later_one_is_named() -> None:
    assert judge("580.159.04").text.endswith("Tesla P40 (sm_61)")
    other = replace(P40, name="NVIDIA H200", capability="9.0")
    assert (
        "R590 does not drive Pascal cards, R580 is the last" in judge("590.10", cards=(other,)).text
    )


def test_compatibility_mode_and_too_old() -> None:
    assert "minor-version compatibility" in judge("470.256.02").text
    assert "minor-version" not in judge("520.61.05").text
    assert "minor-version" in judge("520.61.04").text
    with pytest.raises(Failed, match=r"driver 440\.33\.01 is older than 450\.80\.02"):
        judge("440.33.01")


def test_a_driver_that_shows_no_card() -> None:
    with pytest.raises(Failed, match="R580 is the last branch that drives a P40"):
        judge("590.44.01", cards=(), problem="the driver sees no card")
    with pytest.raises(Failed, match="start it with the NVIDIA runtime"):
        judge("535.129.03", cards=())


def test_no_driver_skips_with_the_reason() -> None:
    with pytest.raises(Skip, match="no NVIDIA driver"):
        driver.judge(Seen(problem="no NVIDIA driver on this machine"), CUDA)


H200 = "NVIDIA H200, GPU-uuid, 143771, 0, 143156, 9.0, 580.159.04\n"
"""What nvidia-smi gave on an H200, its UUID aside."""
ROW = "Tesla P40, GPU-8c1b7a52-6f0e-4f0e-9f5d-0a1b2c3d4e5f, 22919, 345, 22574, 6.1, 535.129.03\n"
"""The same form with a P40's figures."""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an nvidia-smi can be put that is found before any other."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def _program(path: Path, text: str, code: int = 0) -> None:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
    path.chmod(0o755)


def test_nvidia_smi_where_nvml_is_not(smi: Path) -> None:
    _program(smi, ROW + ROW.replace("345", "[N/A]") + "something else\n" + H200)
    seen = gpu._from_smi()
    assert (seen.driver, seen.source) == ("535.129.03", "nvidia-smi")
    card, other = seen.gpus
    assert (other.name, other.free_mib, other.capability) == ("NVIDIA H200", 143156, "9.0")
    assert (card.name, card.total_mib, card.used_mib, card.free_mib) == (
        "Tesla P40",
        22919,
        345,
        22574,
    )


def test_nvidia_smi_that_fails_gives_its_words(smi: Path) -> None:
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    _program(smi, text, 9)
    seen = gpu._from_smi()
    assert not seen.gpus
    assert "couldn't communicate" in seen.problem


WHEEL = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


def test_a_wheel_with_code_for_pascal() -> None:
    found = judge_build("2.6.0+cu118", [*WHEEL, "sm_37"], "11.8")
    assert "sm_60 for the P40" in found.text
    assert "not the pinned" not in found.text
    assert "sm_61 for the P40" in judge_build("2.6.0", ["sm_61"], "11.8").text
    assert "not the pinned" in judge_build("2.11.0+cu130", ["sm_61"], "13.0").text


@pytest.mark.parametrize("flags", [["sm_70", "sm_80"], ["sm_62"], ["sm_50"], ["compute_70"], []])
def test_a_wheel_without(flags: list[str]) -> None:
    with pytest.raises(Failed, match=r"no code for"):
        judge_build("2.8.0+cu128", flags, "12.8")


@pytest.mark.parametrize(
    ("flag", "capability", "runs"),
    [
        ("sm_60", (6, 1), True),
        ("sm_61", (6, 1), True),
        ("sm_61", (6, 0), False),
        ("sm_50", (6, 1), False),
        ("compute_50", (6, 1), True),
        ("compute_61", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_100", (10, 0), True),
        ("sm_90", (10, 0), False),
        ("nonsense", (6, 1), False),
    ],
)
def test_what_code_runs_where(flag: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(flag, capability) is runs
