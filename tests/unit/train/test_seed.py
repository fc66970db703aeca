"""A worker that imports the seed module draws what every such worker of its rank draws."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.stack


def drawn(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; {code}; print(torch.rand(4).tolist())"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_processes_draw_the_same_only_with_it() -> None:
    ours = "import verl_p40.train.seed"
    assert drawn("pass") != drawn("pass"), "torch seeds itself: the module is not needed any more"
    assert drawn(ours) == drawn(ours)


def test_seed_and_rank_change_it() -> None:
    ours = "import verl_p40.train.seed"
    draws = [drawn(ours, RANK="0"), drawn(ours, RANK="1"), drawn(ours, VERL_P40_SEED="7")]
    assert len(set(draws)) == 3
