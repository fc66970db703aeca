"""What the kernels should compute, in float64, written from their definitions.

Inputs are the very float32 values that the kernels get; nothing is rounded on the way.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def attend(
    q: Any, k: Any, v: Any, cached: int, *, slopes: Any = None, window: int = 0, scale: float
) -> Any:
    """Causal attention of the queries that follow ``cached`` tokens.

    Args:
        q: [T, heads, D]; query t is token ``cached + t``.
        k, v: [cached + T, kv_heads, D].
        slopes: of ALiBi, [heads]; the bias is slope times (key's position - query's).
        window: how many tokens, itself among them, a query sees; 0 for all.

    Returns:
        [T, heads, D], float64.
    """
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    out = torch.empty_like(q)
    rows = torch.arange(q.shape[1], device=q.device)[:, None] + cached
    distance = torch.arange(k.shape[1], device=q.device)[None] - rows
    hidden = distance > 0
    if window:
        hidden |= distance <= -window
    for head in range(q.shape[0]):  # one at a time: the scores of all would not fit
        scores = q[head] @ k[head // repeat].T * scale
        if slopes is not None:
            scores += slopes[head].double() * distance
        out[head] = scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v[head // repeat]
    return out.transpose(0, 1)


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """[tokens, hidden], float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def rotate(x: Any, cos_sin: Any, neox: bool) -> Any:
    """The first values of every head, rotated.

    Args:
        x: [tokens, heads, D].
        cos_sin: [tokens, rot_dim], the cosines and then the sines.
        neox: pairs are (i, i + rot_dim/2), else (2i, 2i + 1).
    """
    x = x.double().clone()
    cos, sin = cos_sin.double()[:, None].chunk(2, -1)
    half = cos.shape[-1]
    if neox:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    return x


def activate(name: str, x: Any, threshold: float) -> Any:
    """[tokens, 2 * d] to [tokens, d] for the gated ones, else element by element; float64."""
    x = x.double()
    if name in _PLAIN:
        return _PLAIN[name](x)
    a, b = x.chunk(2, -1)
    if name == "mul_and_silu":
        return a * torch.nn.functional.silu(b)
    if name == "fatrelu_and_mul":
        return torch.where(a > threshold, a, 0.0) * b
    return _GATE[name](a) * b


def _gelu_tanh(x: Any) -> Any:
    return torch.nn.functional.gelu(x, approximate="tanh")


_GATE: dict[str, Any] = {
    "silu_and_mul": torch.nn.functional.silu,
    "gelu_and_mul": torch.nn.functional.gelu,
    "gelu_tanh_and_mul": _gelu_tanh,
}
_PLAIN: dict[str, Any] = {
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}
