"""A kernel that no Triton compiles for sm_61: LLVM ends the process."""

from __future__ import annotations

import triton
import triton.language as tl

from verl_p40.smoke.model import Context, Finding
from verl_p40.smoke.tritoncheck import compile_kernel


@triton.jit
def half_dot(a, b, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, BLOCK)
    left = tl.load(a + rows[:, None] * BLOCK + rows[None, :])
    right = tl.load(b + rows[:, None] * BLOCK + rows[None, :])
    tl.store(out + rows[:, None] * BLOCK + rows[None, :], tl.dot(left, right))


def check(context: Context) -> Finding:
    signature = {"a": "*fp16", "b": "*fp16", "out": "*fp32"}
    compiled = compile_kernel(half_dot, signature, {"BLOCK": 32})
    return Finding(f"{compiled.shared} bytes")
