"""Real hosts replayed: what doctor says of each, to the letter, and what it must have seen."""

from __future__ import annotations

import io
import os
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from verl_p40.cli import doctor_view
from verl_p40.doctor import State, recording, run_checks, select
from verl_p40.doctor.model import Report

CAPTURES = Path(__file__).parent / "captures"
HOSTS = sorted(path.stem for path in CAPTURES.glob("*.yaml"))


@cache
def replay(host: str) -> dict[str, Report]:
    machine = recording.load(CAPTURES / f"{host}.yaml")
    # `presets` plans with verl's config, which has tests of its own.
    chosen = [check for check in select((), machine) if check.id != "presets"]
    return {report.check.id: report for report in run_checks(chosen, machine)}


@pytest.mark.parametrize("host", HOSTS)
def test_transcript(host: str) -> None:
    reports = list(replay(host).values())
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False, color_system=None)
    for report in reports:
        doctor_view.show(console, report, verbose=False, live=False)
    doctor_view.summary(console, reports)
    golden = CAPTURES / f"{host}.txt"
    if os.environ.get("VERL_P40_GOLDEN") == "write":
        golden.write_text(out.getvalue(), encoding="utf-8")
    assert out.getvalue() == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("host", "check", "state", "words"),
    [
        ("p40x2-440-too-old", "driver", State.FAILURE, "440.33.01 is too old for CUDA 11.8"),
        ("p40x2-470-busy", "driver", State.WARNING, "minor-version compatibility"),
        ("p40x2-470-busy", "gpu-processes", State.WARNING, "python (21781) on GPU 0: 16,963 MiB"),
        ("p40x2-470-busy", "gpus", State.OK, "2 x Tesla P40 (compute capability 6.1)"),
        ("p40-520-ecc-on", "driver", State.OK, "520.61.05: runs CUDA 11.8"),
        ("p40-520-ecc-on", "ecc", State.NOTE, "on, 23,040 MiB usable"),
        ("p40-470-ecc-off", "ecc", State.OK, "off, 24,451 MiB usable"),
        ("p40x3-545-ecc-mixed", "ecc", State.NOTE, "GPU 0: off, 24,576 MiB"),
        ("p40x3-545-ecc-mixed", "gpu-processes", State.OK, "4 that draw"),
        ("p40-545-mismatch", "driver", State.FAILURE, "kernel still has 545.23.08"),
        ("p40-525-hot", "temperature", State.WARNING, "73 C while GPU 0 does nothing"),
        ("p40-525-hot", "gpu-memory", State.WARNING, "17,944 of 23,040 MiB taken"),
        ("p40-535-vgpu-host", "driver", State.FAILURE, "has no CUDA"),
        ("p40-535-vgpu-host", "pcie", State.OK, "gen 3 x16"),
        ("p40-535-vgpu-host", "throttle", State.OK, "sw power cap"),
        ("mixed-535", "gpus", State.WARNING, "GTX 1070"),
        ("no-driver-p40", "driver", State.FAILURE, "Tesla P40 on the bus (82:00.0)"),
        ("open-module-p4", "kernel-module", State.FAILURE, "Tesla P4 needs the proprietary one"),
        ("h200-580-open", "driver", State.OK, "580.159.04: runs CUDA 11.8"),
        ("h200-580-open", "kernel-module", State.OK, "the open module"),
        ("h200-580-open", "pcie", State.OK, "gen 5 x16"),
        ("h200-580-open", "device-files", State.OK, "1 card(s)"),
        ("r595-gtx1050", "driver", State.FAILURE, "595.58.03 does not drive GeForce GTX 1050"),
        ("r595-p100", "driver", State.FAILURE, "595.71.03 does not drive Tesla P100-PCIE-16GB"),
        (
            "no-runtime-docker",
            "nvidia-runtime",
            State.FAILURE,
            'could not select device driver "nvidia" with capabilities: [[gpu]]',
        ),
    ],
)
def test_what_is_wrong_with_it(host: str, check: str, state: State, words: str) -> None:
    outcome = replay(host)[check].outcome
    assert (outcome.state, words in outcome.text) == (state, True), outcome.text
    assert bool(outcome.fix) is (state is not State.OK)


def test_the_card_to_use_of_a_mixed_machine_is_named() -> None:
    (first, *_) = replay("mixed-535")["gpus"].outcome.fix
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1 " in first


def test_a_configured_toolkit_that_the_engine_ignores_is_told_apart() -> None:
    outcome = replay("no-runtime-docker")["nvidia-runtime"].outcome
    assert "reads another file" in outcome.text
    assert "snap" in outcome.fix[1]


@pytest.mark.parametrize("host", HOSTS)
def test_no_check_crashes_on_a_real_host(host: str) -> None:
    assert not [r for r in replay(host).values() if r.outcome.facts.get("crashed")]
