"""Fused scaled-dot-product attention against eager attention in FP32, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from verl_p40.smoke.matmul import UNIT
from verl_p40.smoke.model import Context, Failed, Finding
from verl_p40.smoke.torchbuild import limit_memory

FACTOR = 8.0
"""How many times eager FP32's own error against float64 the fused kernel may have. The criterion
is that of FlashAttention's tests (error to a reference at most a small multiple of the error of
the plain implementation in the same precision; theirs is 2 to 3, and up to 3 was seen here); with
TF32 or BF16 inside, the error is a thousand times and more."""

FLOOR = 16 * UNIT
"""Times the largest value of the reference: where eager happens to be nearly exact."""

HEAD_SIZES = (64, 128)
LENGTHS = (96, 77)
"""Tokens: a multiple of the kernels' blocks, and not even of 8."""

Attend = Callable[..., Any]
"""``(q, k, v, mask, causal, scale)``, all ``[batch, heads, tokens, head size]``."""


@dataclass(frozen=True)
class Case:
    """``real`` marks the tokens that are not padding, ``[batch, tokens]``."""

    head: int
    length: int
    kind: str
    mask: Any
    causal: bool
    real: Any

    @property
    def name(self) -> str:
        return f"head size {self.head}, {self.length} tokens, {self.kind}"


def check(context: Context) -> Finding:
    import torch

    limit_memory(context)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    forward, backward, count = compare(context.device, fused(context.device))
    kernel = "memory-efficient" if context.device == "cuda" else "CPU fused"
    return Finding(
        f"{kernel} kernel, {count} cases: at most {forward:.1f} times eager's error forward, "
        f"{backward:.1f} backward",
        context.category,
        {
            "kernel": kernel,
            "cases": count,
            "forward_over_eager": round(forward, 3),
            "backward_over_eager": round(backward, 3),
        },
    )


def cases(device: str) -> Iterator[Case]:
    """Causal without a mask, and causal with left padding, as verl pads its prompts."""
    import torch

    for head in HEAD_SIZES:
        for length in LENGTHS:
            everything = torch.ones(2, length, dtype=torch.bool)
            yield Case(head, length, "causal", None, True, everything)
            real = everything.clone()
            real[1, : length // 3] = False
            allowed = torch.ones(length, length, dtype=torch.bool).tril() & real[:, None, None, :]
            # A padding row sees nothing; as transformers does, it is let see everything, since a
            # softmax over nothing is not a number. Its result is not looked at.
            allowed = allowed | ~allowed.any(-1, keepdim=True)
            mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
            yield Case(head, length, "causal with padding", mask.to(device), False, real)


def eager(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
    """Attention as transformers' eager path computes it, in the type of its inputs."""
    import torch

    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        length = q.shape[-2]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, torch.finfo(torch.float32).min)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    return scores.softmax(-1) @ v


def fused(device: str) -> Attend:
    """torch's SDPA held to one kernel: memory-efficient on CUDA, the fused one on the CPU."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # The CPU's only fused kernel is filed under FLASH_ATTENTION; it takes FP32.
    backend = SDPBackend.EFFICIENT_ATTENTION if device == "cuda" else SDPBackend.FLASH_ATTENTION
    node = "EfficientAttention" if device == "cuda" else "FlashAttentionForCpu"

    def attend(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
        held: AbstractContextManager[Any] = sdpa_kernel(backend)
        with held:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale
            )
        if node not in type(out.grad_fn).__name__:
            raise Failed(f"SDPA did not use the kernel asked for: {type(out.grad_fn).__name__}")
        return out

    return attend


def compare(device: str, attend: Attend) -> tuple[float, float, int]:
    """``(forward, backward, cases)``: the largest error of ``attend`` over eager FP32's.

    Raises:
        Failed: naming the case, and whether forward or which gradient.
    """
    import torch

    made = torch.Generator().manual_seed(21)
    forward = backward = 0.0
    count = 0
    for case in cases(device):
        count += 1
        shape = (2, 4, case.length, case.head)
        inputs = [torch.randn(shape, generator=made).to(device) for _ in range(3)]
        weight = torch.randn(shape, generator=made).to(device)
        real = case.real[:, None, :, None].to(device)
        exact = _run(eager, case, inputs, weight, real, torch.float64)
        plain = _run(eager, case, inputs, weight, real, torch.float32)
        tested = _run(attend, case, inputs, weight, real, torch.float32)
        for name, truth, base, got in zip(_NAMES, exact, plain, tested, strict=True):
            ratio = _ratio(case, name, truth, base, got)
            if name == "output":
                forward = max(forward, ratio)
            else:
                backward = max(backward, ratio)
    return forward, backward, count


_NAMES = ("output", "gradient of q", "gradient of k", "gradient of v")


def _run(attend: Attend, case: Case, inputs: list[Any], weight: Any, real: Any, dtype: Any) -> Any:
    """Output and the three gradients, in float64, padding rows left out of the loss."""
    leaves = [x.to(dtype).detach().requires_grad_(True) for x in inputs]
    out = attend(*leaves, case.mask, case.causal, 1 / math.sqrt(case.head))
    kept = out * real.to(dtype)
    (kept * weight.to(dtype)).sum().backward()
    return [kept.detach().double(), *(leaf.grad.double() for leaf in leaves)]


def _ratio(case: Case, name: str, truth: Any, base: Any, got: Any) -> float:
    """Error of ``got`` over that of ``base``; raises when it is more than allowed."""
    allowed = float((base - truth).abs().max())
    floor = FLOOR * float(truth.abs().max())
    error = float((got - truth).abs().max())
    if not error <= max(FACTOR * allowed, floor):
        raise Failed(
            f"{case.name}: {name} is off by {error:.2e}, and eager FP32 by {allowed:.2e} "
            f"(at most {FACTOR:.0f} times that is allowed)",
            {"case": case.name, "what": name, "error": error, "eager_error": allowed},
        )
    return error / allowed if allowed else 0.0
