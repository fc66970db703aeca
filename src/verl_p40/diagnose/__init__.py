"""From a log to the one thing to do: the rules of ``rules/`` applied to a stream of lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from verl_p40.diagnose import memory
from verl_p40.diagnose.judge import Diagnosis, Finding, judge
from verl_p40.diagnose.memory import CudaOom
from verl_p40.diagnose.scan import scan

__all__ = ["CudaOom", "Diagnosis", "Finding", "diagnose_chunks", "diagnose_lines"]


def diagnose_chunks(
    chunks: Iterable[bytes],
    *,
    advise: Callable[[CudaOom], Sequence[str]] = memory.advise,
) -> Diagnosis:
    """Diagnose a log given as pieces of any size, read once, in bounded memory."""
    return judge(scan(chunks), advise=advise)


def diagnose_lines(lines: Iterable[str]) -> Diagnosis:
    """Diagnose lines of text, with or without their line ends."""
    return diagnose_chunks(line.rstrip("\n").encode("utf-8", "replace") + b"\n" for line in lines)
