"""Triton kernels within what a P40 and triton 2.3.1 can do: no reductions, no half precision.

With 2.3.1 a reduction aborts the compiler for sm_61 (it selects ``shfl.sync.bfly``), and a dot of
FP16 inputs aborts it with every version. Importable only where triton is installed.
"""

from __future__ import annotations

import importlib
from typing import Any

# Not plain imports: lint has no triton, and the kernels below are not typed code.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    """``out[i] = x[i] + y[i]`` for ``i < n``; FP32."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, total, mask=inside)


@triton.jit
def fp32_dot(a, b, out, k, BLOCK: tl.constexpr):
    """``out = a @ b`` for square ``BLOCK`` tiles; row-major FP32, ``[BLOCK, k] @ [k, BLOCK]``.

    ``k`` is a multiple of ``BLOCK``.
    """
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        left = tl.load(a + rows[:, None] * k + inner[None, :])
        right = tl.load(b + inner[:, None] * BLOCK + columns[None, :])
        # allow_tf32 is the spelling that 2.3.1 and 3.2.0 share.
        total += tl.dot(left, right, allow_tf32=False)
    tl.store(out + rows[:, None] * BLOCK + columns[None, :], total)
