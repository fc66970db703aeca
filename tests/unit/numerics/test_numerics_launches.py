"""How vLLM launches its kernels, and that a P40's 48 KiB are enough for every launch it chooses."""

from __future__ import annotations

import pytest

from verl_p40.numerics import launches
from verl_p40.numerics.cases import DECODE, HEAD_SIZES, PAGES

LIMIT = 49_152


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_v1_never_needs_more_than_a_pascal_block_has(size: int, page: int) -> None:
    """The rule ends v1 at 8,192 tokens, 32 KiB; only from about 12,000 on it would not fit."""
    static = size * 4 + 2 * 4 * 4  # the query and two values a warp: attention_kernels.cuh
    worst = 0
    for longest in range(1, 200_000, 97):
        for sequences in (1, 40, 256):
            if launches.uses_v1(longest, sequences, 14):
                used = launches.paged_attention_v1(sequences, 14, size, page, longest).shared
                worst = max(worst, used + static)
    assert worst <= 8192 * 4 + static < LIMIT
    edge = launches.v1_longest(static, page, LIMIT)
    assert 12_000 <= edge < 12_288
    fits, too_much = (
        launches.paged_attention_v1(1, 1, size, page, length).shared + static
        for length in (edge, edge + 1)
    )
    assert fits <= LIMIT < too_much


@pytest.mark.parametrize(
    ("longest", "sequences", "heads", "v1"),
    [
        (512, 1, 1, True),
        (513, 1, 14, False),
        (513, 37, 14, True),
        (513, 32, 16, False),
        (8192, 64, 14, True),
        (8193, 64, 14, False),
    ],
)
def test_the_choice_between_v1_and_v2(longest: int, sequences: int, heads: int, v1: bool) -> None:
    assert launches.uses_v1(longest, sequences, heads) is v1


def test_v2_has_a_block_a_partition_and_joins_them() -> None:
    attend, join = launches.paged_attention_v2(3, 14, 64, 1025)
    assert attend == launches.Launch((14, 3, 3), 128, 2048)
    assert join == launches.Launch((14, 3, 1), 128, 24)
    _, join = launches.paged_attention_v2(1, 14, 64, 131_072)
    assert join.shared == 2048


def test_small_widths_have_small_blocks() -> None:
    assert launches.rms_norm(3, 100).threads == 100
    assert launches.fused_add_rms_norm(255, 896).threads == 896
    assert launches.fused_add_rms_norm(256, 896).threads == 256
    assert [launches.fused_add_width(hidden) for hidden in (896, 100)] == [8, 0]
    assert launches.rotary_embedding(5, 14, 64).threads == 448
    assert launches.reshape_and_cache(5, 2, 64).threads == 128


def test_the_cases_reach_both_versions_and_their_longest_sequences() -> None:
    chosen = {True: 0, False: 0}
    for case in DECODE:
        longest = max(case.lengths)
        v1 = launches.uses_v1(longest, len(case.lengths), case.heads.query)
        chosen[v1] = max(chosen[v1], longest)
    assert chosen == {True: 8192, False: 131_072}
