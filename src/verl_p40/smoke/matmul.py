"""FP32 matrix products against float64, with an error bound that holds for any order of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_p40.smoke.model import Context, Failed, Finding
from verl_p40.smoke.torchbuild import limit_memory

UNIT = 2.0**-24
"""Unit roundoff of FP32."""

SHAPES = (
    (1, 1, 1),
    (64, 16, 64),
    (127, 64, 65),
    (33, 257, 129),
    (512, 896, 896),
    (256, 896, 4864),
    (256, 4864, 896),
    (1, 896, 4096),
)
"""``(M, K, N)``: the layers of Qwen2.5-0.5B (896, 4,864), a decoding step (M = 1), odd sizes that
no tile divides, and short K, where the bound is so tight that TF32's or BF16's rounded inputs
exceed it a hundredfold."""

Product = Callable[[Any, Any], Any]


def gamma(terms: int) -> float:
    """The factor of the bound on a sum of products: ``|error| <= gamma(K) |A| |B|``, elementwise.

    N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.5: with
    unit roundoff u, ``gamma(n) = n u / (1 - n u)``, in whatever order the terms are added, with
    or without fused multiply-add.
    """
    return terms * UNIT / (1 - terms * UNIT)


def check(context: Context) -> Finding:
    import torch

    limit_memory(context)
    # Pascal has no TF32; a newer card would compute with 10 bits where 23 are asked for.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    worst = compare(context.device, torch.matmul)
    return Finding(
        f"{len(SHAPES)} shapes within the bound K u |A||B|; at worst {worst:.2f} of it",
        context.category,
        {"worst_fraction_of_bound": round(worst, 4), "shapes": [list(s) for s in SHAPES]},
    )


def compare(device: str, product: Product) -> float:
    """The largest error over all shapes, as a fraction of its bound.

    Raises:
        Failed: an error exceeds its bound, or a value is not finite.
    """
    import torch

    made = torch.Generator().manual_seed(20)
    worst = 0.0
    for m, k, n in SHAPES:
        a = torch.randn(m, k, generator=made)
        b = torch.randn(k, n, generator=made)
        exact = a.double() @ b.double()
        bound = gamma(k) * (a.double().abs() @ b.double().abs())
        # The second operand as a Linear layer has it: transposed in memory.
        right = b.t().contiguous().to(device).t()
        got = product(a.to(device), right).double().cpu()
        ratio = float(((got - exact).abs() / bound).max())
        if not ratio <= 1.0:
            raise Failed(
                f"FP32 product {m} x {k} x {n}: the error against float64 is {ratio:.3g} times "
                f"the largest that FP32 can make (gamma(K) |A||B|, u = 2^-24)",
                {"shape": [m, k, n], "fraction_of_bound": ratio},
            )
        worst = max(worst, ratio)
    return worst
