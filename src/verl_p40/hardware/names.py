"""The compute capability of a card by its product name."""

from __future__ import annotations

import re

_NAMES: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"RTX PRO|RTX 50\d\d", (12, 0)),
    (r"\b[GB]B200\b|\bB[23]00\b", (10, 0)),
    (r"\bG?H[12]00\b|\bH20\b|\bH800\b", (9, 0)),
    (r"\bL4\b|\bL40S?\b|\bL20\b|RTX 40\d\d|Ada", (8, 9)),
    (r"\bA100\b|\bA30\b|\bA800\b", (8, 0)),
    (r"\bA(2|10|16|40)\b|RTX A\d|RTX 30\d\d", (8, 6)),
    (r"\bT4G?\b|RTX 20\d\d|GTX 16\d\d|Quadro RTX|TITAN RTX|\bT\d{3,4}\b", (7, 5)),
    (r"V100|TITAN V\b|GV100", (7, 0)),
    (r"P100|GP100", (6, 0)),
    (r"\bP(4|6|10|40)\b|GTX 10\d\d|TITAN X[p]|Quadro P\d|P10[0246]-|\bMX[123]\d\d\b", (6, 1)),
    (r"\bM(4|6|10|40|60)\b|GTX 9\d\d|TITAN X\b|Quadro M\d", (5, 2)),
    (r"\bK80\b", (3, 7)),
    (r"\bK(20|40)\w?\b", (3, 5)),
)


def capability_of(name: str) -> tuple[int, int] | None:
    """The compute capability of the card that ``name`` describes; None: not known here.

    Source: NVIDIA, "CUDA GPU Compute Capability".
    """
    return next((cc for pattern, cc in _NAMES if re.search(pattern, name)), None)
