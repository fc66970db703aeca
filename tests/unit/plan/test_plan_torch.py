"""What logits, log-probability and entropy take in real torch, by its CPU allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from verl_p40.plan import tensors

pytestmark = pytest.mark.stack

VOCABULARY, HIDDEN, BATCH, LENGTH, RESPONSE = 5_000, 4, 4, 48, 20


def _peak(work: Callable[[], object]) -> int:
    """Bytes at the peak of what ``work`` allocates, its result included."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    del kept
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _forward(entropy: str | None) -> object:
    """The padded end of verl's ``DataParallelPPOActor._forward_micro_batch``."""
    import torch
    import verl.utils.torch_functional as verl_F

    with torch.no_grad():
        logits = torch.zeros(BATCH, LENGTH, VOCABULARY).div_(1.0)
        part = logits[:, -RESPONSE - 1 : -1, :]
        responses = torch.zeros(BATCH, RESPONSE, dtype=torch.long)
        kept = [logits, verl_F.logprobs_from_logits(part, responses)]
        if entropy is not None:
            kept.append(getattr(verl_F, entropy)(part))
    return kept


@pytest.mark.parametrize(
    ("entropy", "rows"),
    [
        (None, 0),
        ("entropy_from_logits", tensors.entropy_rows(BATCH, RESPONSE, chunked=False)),
        ("entropy_from_logits_with_chunking", tensors.entropy_rows(BATCH, RESPONSE, chunked=True)),
    ],
)
def test_logits_of_a_log_prob(entropy: str | None, rows: int) -> None:
    _forward(entropy)  # what is made once is not of the peak
    planned = tensors.logits_forward(VOCABULARY, BATCH, LENGTH, RESPONSE, rows)
    assert _peak(lambda: _forward(entropy)) == pytest.approx(planned, rel=0.005)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("response", [RESPONSE, 40])
def test_logits_and_their_gradients(entropy: bool, response: int) -> None:
    import torch
    import verl.utils.torch_functional as verl_F

    hidden = torch.zeros(BATCH, LENGTH, HIDDEN, requires_grad=True)
    weight = torch.zeros(VOCABULARY, HIDDEN, requires_grad=True)

    def work() -> None:
        hidden.grad = weight.grad = None
        logits = torch.nn.functional.linear(hidden, weight)
        logits.div_(1.0)
        part = logits[:, -response - 1 : -1, :]
        responses = torch.zeros(BATCH, response, dtype=torch.long)
        loss = verl_F.logprobs_from_logits(part, responses).sum()
        if entropy:
            loss = loss + verl_F.entropy_from_logits(part).sum()
        del logits, part
        loss.backward()

    head = _Shape(VOCABULARY, VOCABULARY * HIDDEN)
    planned = tensors.logits_backward(head, BATCH, LENGTH, response, entropy)
    work()
    assert _peak(work) == pytest.approx(planned, rel=0.02)


@dataclass
class _Shape:
    vocabulary: int
    embedding: int
