"""The reader against the real torch of the training stack, and against NVIDIA's own tool."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from verl_p40.kernels.capability import Capability
from verl_p40.kernels.inspect import inspect
from verl_p40.kernels.verdict import Verdict
from verl_p40.stack import env

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def stack() -> env.StackEnv:
    found = env.adopted()
    assert found is not None, "VERL_P40_ENV names the environment these tests run in"
    return found


def test_torch_holds_what_it_says(stack: env.StackEnv) -> None:
    """libtorch_cuda.so, 900 MB, by its package name: the list torch was built with, in seconds."""
    import torch

    started = time.process_time()
    report = inspect("torch", Capability(6, 1), stack)
    assert time.process_time() - started < 20
    (library,) = [file for file in report.files if file.name.endswith("/libtorch_cuda.so")]
    built_for = set(torch._C._cuda_getArchFlags().split())
    assert {target for target in library.targets if not target.endswith("a")} == built_for
    assert "sm_60" in built_for
    assert library.native > 250
    # The int4 product for Ampere: sm_60 code is there, without a kernel in it.
    assert library.missing == 1
    assert library.verdict is Verdict.PARTLY


def test_the_same_as_cuobjdump(stack: env.StackEnv) -> None:
    """Triton brings NVIDIA's cuobjdump along."""
    tool = stack.site_packages / "triton/backends/nvidia/bin/cuobjdump"
    library: Path = stack.site_packages / "torch/lib/libtorch_cuda_linalg.so"
    done = subprocess.run(
        [tool, "-lelf", "-lptx", library], capture_output=True, text=True, check=True
    )
    listed: Counter[str] = Counter()
    for number, kind in re.findall(r"\.sm_(\w+)\.(cubin|ptx)", done.stdout):
        listed[f"{'sm' if kind == 'cubin' else 'compute'}_{number}"] += 1
    report = inspect(str(library), Capability(6, 1), stack)
    assert listed and report.files[0].targets == listed
    assert report.verdict is Verdict.NATIVE
