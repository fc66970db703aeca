"""The checks, from cheap to dear."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from verl_p40.errors import UsageError
from verl_p40.smoke.model import Check

_ROOM = "verl_p40.smoke"

CHECKS: tuple[Check, ...] = (
    Check(
        "driver",
        "NVIDIA driver: version, branch, cards",
        f"{_ROOM}.driver:check",
        where="command",
        limit=60,
        gpu="none",
    ),
    Check(
        "device",
        "the card as the stack's torch sees it",
        f"{_ROOM}.torchbuild:check_device",
        gpu="only",
        gpu_mib=512,
    ),
    Check(
        "build",
        "torch is the pinned build and has code for sm_61",
        f"{_ROOM}.torchbuild:check_build",
        gpu="none",
    ),
    Check(
        "patches",
        "verl is the pinned release with the patch queue",
        f"{_ROOM}.patched:check",
        where="command",
        gpu="none",
    ),
    Check(
        "matmul",
        "FP32 matrix products against float64, TF32 off",
        f"{_ROOM}.matmul:check",
        gpu_mib=1024,
        ram_mib=1000,
    ),
    Check(
        "attention",
        "fused SDPA against eager attention in FP32, forward and backward",
        f"{_ROOM}.attention:check",
        gpu_mib=1024,
        ram_mib=1000,
    ),
    Check(
        "triton",
        "Triton kernels that a P40 can run: vector add, FP32 dot",
        f"{_ROOM}.tritoncheck:check",
        gpu_mib=1024,
        ram_mib=1000,
    ),
    Check(
        "data",
        "the demo's problems and model, made once",
        f"{_ROOM}.data:check",
        where="command",
        dear=True,
        limit=900,
        gpu="none",
        ram_mib=1500,
    ),
    Check(
        "tripwire",
        "the demo's model computes without half precision, and the tripwire sees a planted one",
        f"{_ROOM}.halfprecision:check",
        dear=True,
        limit=300,
        gpu_mib=1536,
        ram_mib=1500,
        needs=("data",),
    ),
    Check(
        "vllm",
        "vLLM generates what Hugging Face generates, token by token",
        f"{_ROOM}.generate:check",
        dear=True,
        limit=600,
        gpu_mib=4096,
        ram_mib=4000,
        needs=("data",),
    ),
    Check(
        "ppo",
        "one PPO step of verl.trainer.main_ppo under the tripwire, saved",
        f"{_ROOM}.ppo:check_step",
        where="command",
        dear=True,
        limit=900,
        grace=45,
        gpu_mib=3072,
        ram_mib=4500,
        needs=("data",),
    ),
    Check(
        "checkpoint",
        "the run resumes from its checkpoint: what is loaded is what was saved",
        f"{_ROOM}.ppo:check_resume",
        where="command",
        dear=True,
        limit=900,
        grace=45,
        gpu_mib=3072,
        ram_mib=4500,
        needs=("ppo",),
    ),
)


def choose(
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    *,
    fast: bool = False,
    checks: Iterable[Check] = CHECKS,
) -> tuple[Check, ...]:
    """The checks to run, in order. What a chosen one needs is chosen with it.

    Raises:
        UsageError: an unknown name (the nearest is given), or nothing is left.
    """
    every = {check.name: check for check in checks}
    for name in (*only, *skip):
        if name not in every:
            near = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
            raise UsageError(
                f"there is no check {name!r}" + (f"; nearest: {near[0]}" if near else ""),
                fix=f"one of: {', '.join(every)}",
            )
    wanted = set(only) or {n for n, check in every.items() if not (fast and check.dear)}
    wanted -= set(skip)
    todo = list(wanted)
    while todo:
        for need in every[todo.pop()].needs:
            if need not in wanted and need not in skip:
                wanted.add(need)
                todo.append(need)
    chosen = tuple(check for name, check in every.items() if name in wanted)
    if not chosen:
        raise UsageError("every check is left out", fix="drop --skip, or see --list")
    return chosen
