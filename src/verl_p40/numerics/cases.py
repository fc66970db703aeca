"""What is run: shapes, lengths of the sequences, head sizes. ``build`` and ``run`` both read it."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_SIZES = (64, 80, 96, 128, 256)
PAGES = (8, 16, 32)


@dataclass(frozen=True)
class Heads:
    """Query heads and KV heads: grouped-query attention where they differ."""

    query: int
    kv: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}"


QWEN_05B, QWEN_15B = Heads(14, 2), Heads(12, 2)
"""Of Qwen2.5-0.5B (head size 64) and 1.5B (128)."""


@dataclass(frozen=True)
class Prefix:
    """A prefill over cached prefixes.

    Attributes:
        lengths: cached and new tokens of every sequence.
        window: tokens of a sliding window; 0 is none.
    """

    name: str
    head_size: int
    heads: Heads
    lengths: tuple[tuple[int, int], ...]
    page: int = 16
    alibi: bool = False
    window: int = 0

    @property
    def longest(self) -> int:
        return max(cached + new for cached, new in self.lengths)

    @property
    def pages(self) -> tuple[int, ...]:
        """Blocks of the KV cache that every sequence has."""
        return tuple(-(-(cached + new) // self.page) for cached, new in self.lengths)


@dataclass(frozen=True)
class Decode:
    """One token a sequence attends to ``lengths`` tokens in the KV cache."""

    name: str
    head_size: int
    heads: Heads
    lengths: tuple[int, ...]
    page: int = 16
    alibi: bool = False


_RAGGED = ((0, 7), (16, 5), (37, 21), (64, 1), (3, 40), (512, 256), (1000, 129))
_LONG = ((32_000, 300), (8_191, 33), (0, 17), (16_384, 1))

PREFIX = (
    Prefix("ragged", 64, QWEN_05B, _RAGGED),
    Prefix("ragged", 128, QWEN_15B, _RAGGED),
    Prefix("ragged, MHA, pages of 32", 64, Heads(4, 4), _RAGGED, page=32),
    Prefix("ragged, MQA, pages of 32", 128, Heads(8, 1), _RAGGED, page=32),
    Prefix("ragged", 80, Heads(4, 4), _RAGGED),
    Prefix("ragged", 256, Heads(4, 1), _RAGGED),
    Prefix("window of 100", 64, QWEN_05B, _RAGGED, window=100),
    Prefix("long", 64, QWEN_05B, _LONG),
    Prefix("long", 128, QWEN_15B, _LONG),
    Prefix("ragged", 64, Heads(8, 2), _RAGGED, alibi=True),
    Prefix("ragged", 128, Heads(8, 2), _RAGGED, alibi=True),
)

_SHORT = (1, 5, 16, 17, 31, 64, 100, 511, 512)
_MIDDLE = (1, 300, 512, 513, 1024, 1500, 2000)
_BATCH = (*range(1, 8192, 222), 4096, 4097, 8191, 8192)
"""More than 512 query heads in all, the condition for v1 at these lengths."""
_VERY_LONG = (32_768, 1, 20_000, 513)

DECODE = (
    *(
        Decode("short", size, QWEN_05B if size == 64 else QWEN_15B, _SHORT, page)
        for size in HEAD_SIZES
        for page in PAGES
    ),
    *(
        Decode("middle", size, QWEN_05B if size == 64 else QWEN_15B, _MIDDLE, page)
        for size in HEAD_SIZES
        for page in PAGES
    ),
    Decode("short, MHA", 64, Heads(4, 4), _SHORT),
    Decode("middle, MQA", 128, Heads(8, 1), _MIDDLE),
    Decode("short, ALiBi", 64, Heads(8, 2), _SHORT, alibi=True),
    Decode("middle, ALiBi", 128, Heads(8, 2), _MIDDLE, alibi=True),
    Decode("41 to 8,192", 64, QWEN_05B, _BATCH),
    Decode("41 to 8,192", 128, Heads(16, 2), _BATCH),
    Decode("4 to 32,768", 64, QWEN_05B, _VERY_LONG),
    Decode("4 to 32,768", 128, QWEN_15B, _VERY_LONG),
    Decode("131,072", 128, QWEN_15B, (131_072, 100_001)),
)

NORMS = ((1, 896), (37, 896), (300, 1536), (5, 4096), (3, 100), (64, 64))
"""Tokens and hidden size: Qwen2.5's, a width that is no multiple of 8, that of a norm per head."""


@dataclass(frozen=True)
class Rotary:
    """``rot_dim`` of ``head_size`` values of a head are rotated; positions go up to ``longest``."""

    head_size: int
    heads: Heads
    rot_dim: int
    neox: bool = True
    offsets: bool = False
    tokens: int = 53
    longest: int = 32_768


ROTARY = (
    Rotary(64, QWEN_05B, 64),
    Rotary(128, QWEN_15B, 128),
    Rotary(80, Heads(4, 4), 32),
    Rotary(64, QWEN_05B, 64, neox=False),
    Rotary(128, Heads(8, 1), 128, offsets=True),
    Rotary(64, QWEN_05B, 64, neox=False, offsets=True),
)

GATED = ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul", "fatrelu_and_mul")
PLAIN = ("gelu_new", "gelu_fast", "gelu_quick")
WIDTHS = ((37, 4864), (5, 8960), (3, 100))
"""Tokens and intermediate size: of Qwen2.5-0.5B and 1.5B, and a small one."""

CACHE = tuple((size, page) for size in (64, 128) for page in PAGES)
