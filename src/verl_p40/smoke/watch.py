"""Writes down, by content, what verl's checkpoints save and what a resumed run has loaded.

verl imports this in each worker (``actor_rollout_ref.model.external_lib``). It wraps
``FSDPCheckpointManager.save_checkpoint`` and ``load_checkpoint``: the digests are of the live
weights, optimizer state and random generators of two processes, not of the files between them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

import verl_p40.train.seed  # noqa: F401 - as the preset does: a run that repeats itself
from verl_p40.train.checkpoints import PARTIAL
from verl_p40.train.folder import write_whole

FOLDER = "VERL_P40_SMOKE_WATCH"


def digests(manager: Any) -> dict[str, Any]:
    """``{model, optimizer, rng}`` as sha256, and the ``bytes`` of model and optimizer state."""
    model, size = _digest(manager.model.named_parameters())
    optimizer, more = _digest(_tensors("", manager.optimizer.state_dict()))
    rng = hashlib.sha256(pickle.dumps(_plain(manager.get_rng_state()))).hexdigest()
    return {"model": model, "optimizer": optimizer, "rng": rng, "bytes": size + more}


def _digest(named: Iterator[tuple[str, Any]]) -> tuple[str, int]:
    """sha256 over names, types, shapes and bytes; and how many bytes."""
    state, size = hashlib.sha256(), 0
    for name, tensor in named:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local = local.detach().cpu().contiguous()
        state.update(f"{name} {local.dtype} {list(local.shape)}\n".encode())
        state.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
        size += local.numel() * local.element_size()
    return state.hexdigest(), size


def _tensors(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of a nested state, in an order of its names."""
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, dict):
        for key in sorted(node, key=str):
            yield from _tensors(f"{name}.{key}", node[key])
    elif isinstance(node, (list, tuple)):
        for number, item in enumerate(node):
            yield from _tensors(f"{name}.{number}", item)


def _plain(state: Any) -> Any:
    """Generator states as bytes and plain objects, which pickle the same way every time."""
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().tobytes()
    if isinstance(state, dict):
        return [(key, _plain(state[key])) for key in sorted(state)]
    if isinstance(state, (list, tuple)):
        return [_plain(item) for item in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


def _write(kind: str, checkpoint: Path, document: dict[str, Any]) -> None:
    # While it is saved, a checkpoint has its name with a word behind it.
    role, step = checkpoint.name, checkpoint.parent.name.removesuffix(PARTIAL)
    rank = os.environ.get("RANK", "0")
    target = Path(os.environ[FOLDER]) / f"{kind}-{step}-{role}-{rank}.json"
    write_whole(target, json.dumps(document))


def _wrapped_save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(self, local_path, *args, **kwargs)
        if local_path is not None:
            _write("saved", Path(local_path), digests(self))
        return done

    return save_checkpoint


def _wrapped_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if local_path is None:
            return original(self, local_path, *args, **kwargs)
        before = digests(self)
        done = original(self, local_path, *args, **kwargs)
        _write("loaded", Path(local_path), {**digests(self), "before": before})
        return done

    return load_checkpoint


FSDPCheckpointManager.save_checkpoint = _wrapped_save(FSDPCheckpointManager.save_checkpoint)
FSDPCheckpointManager.load_checkpoint = _wrapped_load(FSDPCheckpointManager.load_checkpoint)
