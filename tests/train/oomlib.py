"""Imported in verl's workers (``external_lib``): runs out of memory once, where it is told to.

``OOM_AT`` is ``class.method:call``, the class one of verl's workers' own; ``OOM_DONE`` a file that
is made when it has struck.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import verl.workers.actor.dp_actor
import verl.workers.critic.dp_critic
import verl.workers.rollout.hf_rollout

import verl_p40.train.seed  # noqa: F401

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 22.38 GiB of "
    "which 512.00 MiB is free. Of the allocated memory 20.10 GiB is allocated by PyTorch, and "
    "1.20 GiB is reserved by PyTorch but unallocated."
)
CLASSES = {
    "actor": verl.workers.actor.dp_actor.DataParallelPPOActor,
    "critic": verl.workers.critic.dp_critic.DataParallelPPOCritic,
    "rollout": verl.workers.rollout.hf_rollout.HFRollout,
}

where, number = os.environ["OOM_AT"].split(":")
name, method = where.split(".")
whole = getattr(CLASSES[name], method)
done = Path(os.environ["OOM_DONE"])
calls = 0


@functools.wraps(whole)
def struck(*args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    if calls == int(number) and not done.exists():
        done.touch()
        raise torch.OutOfMemoryError(MESSAGE)
    return whole(*args, **kwargs)


setattr(CLASSES[name], method, struck)
