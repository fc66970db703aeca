"""Which card a log is about, so that advice is for it and not for a P40."""

from __future__ import annotations

import re
from collections.abc import Iterable

from verl_p40.hardware.names import capability_of
from verl_p40.kernels.capability import Capability

_NUMBER = r"\(?(?P<major>\d{1,2})(?:\.|, ?)(?P<minor>\d)\)?"
_TOLD = (
    # xFormers, vLLM, bitsandbytes, Triton's and torch's own checks: what the card has, never what
    # is required.
    re.compile(rf"your (?:GPU|device|card) has (?:compute )?capability:? ?{_NUMBER}", re.I),
    re.compile(rf"GPU has compute capability {_NUMBER}"),
    re.compile(rf"which is of (?:cuda |compute )?capability {_NUMBER}", re.I),
    re.compile(rf"\bof CUDA Capability {_NUMBER} is too old"),
    re.compile(rf"[Cc]ompute [Cc]apability (?:of device |< \d+\.\d:? )?detected:? ?{_NUMBER}"),
    re.compile(rf"COMPUTE_CAPABILITY[^=\n]{{0,12}}= ?{_NUMBER}"),
    re.compile(r"with CUDA capability sm_(?P<major>\d{1,2})(?P<minor>\d) is not compatible"),
)
_NAMED = re.compile(
    r"(?:NVIDIA |Nvidia |Tesla |GeForce |Quadro )+(?P<name>(?:GeForce |Tesla |Quadro )?"
    r"(?:RTX(?: PRO)? ?A?\d{3,4}|GTX ?\d{3,4}|TITAN \w+|[A-Z]{1,2}\d{1,4}\w?)\b)"
    r"|\b(?P<bare>(?:RTX [2-5]0|GTX (?:9|10|16))\d\d|V100|P100|TITAN [A-Z]\w*)\b"
)


def capability_in(lines: Iterable[str]) -> Capability | None:
    """The compute capability of the one card that ``lines`` tell of; None: none, or several."""
    told: set[Capability] = set()
    named: set[Capability] = set()
    for line in lines:
        for pattern in _TOLD:
            told.update(
                Capability(int(m["major"]), int(m["minor"])) for m in pattern.finditer(line)
            )
        for match in _NAMED.finditer(line):
            found = capability_of(match["name"] or match["bare"])
            if found:
                named.add(Capability(*found))
    for found_ones in (told, named):
        if found_ones:
            return found_ones.pop() if len(found_ones) == 1 else None
    return None
