"""vLLM's kernels for a P40 on the GPU at hand: compiled by its driver from sm_61 PTX, near float64.

Needs what ``python scripts/numerics.py build .gpu/numerics`` makes where there is nvcc, and torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_p40.numerics import cases
from verl_p40.numerics.manifest import MANIFEST

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("VERL_P40_NUMERICS", ROOT / ".gpu" / "numerics"))


@pytest.fixture(scope="module", autouse=True)
def gpu_and_ptx() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if not (FOLDER / MANIFEST).is_file():
        pytest.skip("no PTX: python scripts/numerics.py build .gpu/numerics, where nvcc is")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "verl_p40.numerics", "run", str(FOLDER), "--json", "--seed", "7"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_every_kernel_is_within_its_bound(report: dict[str, Any]) -> None:
    assert [row for row in report["rows"] if not row["ok"]] == []
    assert max(row["error"] for row in report["rows"]) < 1e-5


def test_every_case_was_run(report: dict[str, Any]) -> None:
    names = [row["kernel"] for row in report["rows"]]
    assert sum(name.startswith("prefix prefill") for name in names) == len(cases.PREFIX)
    assert sum(name.startswith("paged_attention_v") for name in names) == len(cases.DECODE)
    assert {"paged_attention_v1", "paged_attention_v2", "copy_blocks", "gelu_quick"} <= set(names)


def test_what_ran_was_made_from_ptx_for_a_p40(report: dict[str, Any]) -> None:
    """By the PTX files, and by the driver's own word of what it compiled them from and for."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    assert report["ptx_targets"] == ["sm_61"]
    assert report["driver_compiled"] == {"ptx": [61], "binary": [10 * major + minor]}


def test_no_launch_has_more_shared_memory_than_a_pascal_block(report: dict[str, Any]) -> None:
    assert max(row["shared"] for row in report["rows"]) <= 49_152


def test_a_kernel_that_is_a_little_wrong_does_not_pass() -> None:
    """The softmax's scale a thousandth off; a lookup in the wrong row of the block table."""
    from verl_p40.numerics import compare
    from verl_p40.numerics.device import opened

    with opened(FOLDER) as device:
        right = device.launch
        cases_of_both = [case for case in cases.DECODE if case.name in ("short", "middle")]

        def scaled(kernel: str, launch: Any, *values: Any) -> int:
            off = [v * 1.001 if isinstance(v, float) else v for v in values]
            return right(kernel, launch, *off)

        def shifted(kernel: str, launch: Any, *values: Any) -> int:
            import torch

            off = [
                v.roll(1, 0) if isinstance(v, torch.Tensor) and v.dtype == torch.int32 else v
                for v in values
            ]
            return right(kernel, launch, *off)

        for wrong in (scaled, shifted):
            for case in (cases_of_both[0], cases_of_both[-1]):
                assert compare.decode(device, case).ok
                device.launch = wrong  # type: ignore[method-assign]
                assert not compare.decode(device, case).ok
                device.launch = right  # type: ignore[method-assign]
