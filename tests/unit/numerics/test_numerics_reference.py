"""The float64 references against other ways to the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.stack


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    import torch

    made = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=made) for shape in shapes]


def test_attention_is_torchs_with_grouped_heads() -> None:
    import torch

    from verl_p40.numerics.reference import attend

    q, k, v = tensors((5, 6, 16), (12, 2, 16), (12, 2, 16))
    wide = [x.double().repeat_interleave(3, 1).transpose(0, 1) for x in (k, v)]
    mask = torch.arange(12)[None] <= torch.arange(5)[:, None] + 7
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1), *wide, attn_mask=mask, scale=0.3
    )
    found = attend(q, k, v, 7, scale=0.3)
    assert found.dtype is torch.float64
    assert torch.allclose(found, wanted.transpose(0, 1), rtol=0, atol=1e-14)


def test_a_window_and_alibi_by_hand() -> None:
    import torch

    from verl_p40.numerics.reference import attend

    q, k, v = tensors((2, 1, 4), (5, 1, 4), (5, 1, 4))
    found = attend(q, k, v, 3, window=2, slopes=torch.tensor([0.5]), scale=1.0)
    for row in range(2):
        now = row + 3
        weights = {
            key: math.exp(float(q[row, 0].double() @ k[key, 0].double()) + 0.5 * (key - now))
            for key in (now - 1, now)
        }
        wanted = sum(w * v[key, 0].double() for key, w in weights.items()) / sum(weights.values())
        assert torch.allclose(found[row, 0], wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("neox", [True, False])
def test_rotation_is_a_product_of_complex_numbers(neox: bool) -> None:
    import torch

    from verl_p40.numerics.reference import rotate

    (x,) = tensors((3, 2, 8))
    angles = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    found = rotate(x, torch.cat([angles.cos(), angles.sin()], -1), neox)
    real, imaginary = (slice(0, 2), slice(2, 4)) if neox else (slice(0, 4, 2), slice(1, 4, 2))
    turned = torch.complex(x.double()[..., real], x.double()[..., imaginary])
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(found[..., real], turned.real, rtol=0, atol=1e-14)
    assert torch.allclose(found[..., imaginary], turned.imag, rtol=0, atol=1e-14)
    assert torch.equal(found[..., 4:], x.double()[..., 4:])


def test_errors_are_of_the_worst_sequence_and_vector_and_nan_does_not_pass() -> None:
    import torch

    from verl_p40.numerics.compare import BOUND, VECTOR, Row, measure

    wanted = torch.tensor([[300.0, 400.0], [3.0, 4.0], [4.0, 3.0]], dtype=torch.float64)
    found = wanted.clone()
    found[1, 1] += 1e-3
    errors = measure((found, wanted))
    assert errors.norm == pytest.approx(1e-3 / float(wanted.norm()), rel=1e-9)
    assert errors.vector == pytest.approx(1e-3 / 4, rel=1e-9)
    # A large sequence beside it does not make it look better.
    assert measure((found, wanted), parts=[1, 2]).norm == pytest.approx(1e-3 / 50**0.5, rel=1e-9)
    for row, column in ((0, 0), (2, 1)):
        broken = wanted.clone()
        broken[row, column] = float("nan")
        for pairs in ([(broken, wanted), (wanted, wanted)], [(wanted, wanted), (broken, wanted)]):
            errors = measure(*pairs, parts=[1, 2])
            assert math.isnan(errors.norm) and math.isnan(errors.vector)
            assert not Row("one", "", errors.norm, 0.0, BOUND, 0).ok
            assert not Row("one", "", 0.0, errors.vector, BOUND, 0).ok
    assert Row("one", "", 0.0, 0.0, 0.0, 49_152).ok
    assert not Row("one", "", 0.0, 0.0, 0.0, 49_153).ok
    assert not Row("one", "", 0.0, 1e-20, 0.0, 0).ok
    assert not Row("one", "", 0.0, 1.1 * VECTOR * BOUND, BOUND, 0).ok
