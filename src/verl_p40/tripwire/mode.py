"""A torch dispatch mode that stops at the first half-precision tensor."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_p40.tripwire.record import Trip

HALF: frozenset[torch.dtype] = frozenset(
    getattr(torch, name)
    for name in (
        "float16",
        "bfloat16",
        "complex32",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)
"""Every floating type narrower than FP32 that this torch has. float64 and integers are fine."""

_READERS = (
    # Functions of transformers that read a checkpoint file in the type it was saved in and put
    # each tensor into the model's own type. Qwen2.5 is published in BF16: to refuse its file
    # would be to refuse the model. What the model then *is* gets no such pardon.
    "load_state_dict",
    "_load_state_dict_into_meta_model",
    "_load_parameter_into_model",
    "load_shard_file",
    "load_shard_files_with_threadpool",
)
_ROLES = {"CriticWorker": "critic", "RewardModelWorker": "reward model"}
_MODEL_ROLES = {"ref": "reference", "actor": "actor", "rollout": "rollout"}


class HalfPrecisionError(RuntimeError):
    """A half-precision tensor was made while the tripwire was armed."""


class Tripwire(TorchDispatchMode):  # type: ignore[misc]
    """Checks what every operator gives back, below autocast and autograd.

    Autocast's casts, the backward pass, FSDP's low-precision shards and foreach optimizer steps
    all come through here as operators. Not reentrant, and entered once a thread.

    Args:
        on_trip: called with the finding before the error is raised.
        on_count: called with the number of operators checked, after each: it must be cheap.

    Raises (from the operator):
        HalfPrecisionError: with one line that names operator, tensors, call site and role.
    """

    def __init__(
        self,
        on_trip: Callable[[Trip], object] = lambda trip: None,
        on_count: Callable[[int], object] = lambda count: None,
    ) -> None:
        super().__init__()
        self.operators = 0
        self._on_trip = on_trip
        self._on_count = on_count
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        self._on_count(self.operators)
        # Almost every operator gives one tensor: no generator for those.
        if isinstance(result, torch.Tensor):
            half = result.dtype in HALF
        else:
            half = any(t.dtype in HALF for t in _tensors(result))
        if half and not _is_checkpoint_reader(sys._getframe(1)):
            self._trip(func, args, kwargs or {}, result)
        return result

    def _trip(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        import os

        frame = self._user_frame()
        site, via = _sites(frame)
        trip = Trip(
            operator=str(func),
            made=tuple(_spell(t) for t in _tensors(result) if t.dtype in HALF)[:4],
            inputs=tuple(_spell(t) for t in _tensors([args, kwargs]))[:4],
            site=site,
            via="" if via == site else via,
            role=_role(frame),
            pid=os.getpid(),
        )
        self._on_trip(trip)
        raise HalfPrecisionError(trip.line())

    def _user_frame(self) -> FrameType:
        """The frame to look at: on autograd's device threads, that of the waiting main thread."""
        frame = sys._getframe(2)
        if threading.get_ident() != self._thread:
            return sys._current_frames().get(self._thread, frame)
        return frame


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _tensors(item)
    elif isinstance(node, dict):
        for item in node.values():
            yield from _tensors(item)


def _spell(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_checkpoint_reader(frame: FrameType) -> bool:
    return any(
        f.f_code.co_name in _READERS and _module(f) == "transformers.modeling_utils"
        for f in _frames(frame)
    )


_PLUMBING = ("torch", "verl_p40.tripwire", "contextlib", "threading")


def _sites(frame: FrameType) -> tuple[str, str]:
    """``(innermost frame outside torch, innermost frame of verl)``; the last may be empty."""
    site = via = ""
    for f in _frames(frame):
        name = _module(f)
        if name.split(".")[0] in _PLUMBING or name.startswith("verl_p40.tripwire"):
            continue
        if not site:
            site = _place(f)
        if name == "verl" or name.startswith("verl."):
            via = _place(f)
            break
    return site or _place(frame), via


_SITE = Path(sysconfig.get_paths()["purelib"])


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    for root in (_SITE, *(Path(p) for p in sys.path if p)):
        if path.is_relative_to(root):
            path = path.relative_to(root)
            break
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


def _role(frame: FrameType) -> str:
    """Which of verl's models the frame works for, from the worker object up the stack."""
    rollout = False
    for f in _frames(frame):
        name = _module(f)
        if name.startswith("verl.workers.rollout") or f.f_code.co_name == "generate_sequences":
            rollout = rollout or name.startswith("verl.workers")
        owner = f.f_locals.get("self")
        for cls in type(owner).__mro__ if owner is not None else ():
            if cls.__name__ in _ROLES:
                return _ROLES[cls.__name__]
            if cls.__name__ == "ActorRolloutRefWorker":
                if rollout:
                    return "rollout"
                role = str(getattr(owner, "role", "actor"))
                return _MODEL_ROLES.get(role, "reference" if role == "ref" else "actor")
    return "rollout" if rollout else "no worker of verl"
