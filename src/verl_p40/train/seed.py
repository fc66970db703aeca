"""Importing this module seeds torch in the importing process, for a run that can be repeated.

verl 0.4.1 seeds the order of the data and nothing else: every worker samples its responses and
draws its value head from a generator that torch seeds at random. verl imports
``actor_rollout_ref.model.external_lib`` at the start of each worker's ``init_model``, before any
weight is made, so a preset that names this module there repeats itself exactly: the same machine,
files and config give the same metrics, bit for bit (seen on the CPU). A resumed run takes its
generator's state from the checkpoint, which is loaded later.

``VERL_P40_SEED`` chooses the seed. Each rank adds its own number: ranks that sampled with the same
generator would repeat one another.
"""

from __future__ import annotations

import os
from typing import Final

import torch

DEFAULT: Final = 1


def seed() -> int:
    """The seed of this process: ``VERL_P40_SEED`` plus the rank that Ray's worker group set."""
    return int(os.environ.get("VERL_P40_SEED") or DEFAULT) + int(os.environ.get("RANK") or 0)


torch.manual_seed(seed())
