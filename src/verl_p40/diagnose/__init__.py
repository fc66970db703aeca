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
    first_line: int = 1,
    advise: Callable[[CudaOom], Sequence[str]] = memory.advise,
) -> Diagnosis:
    """Diagnose a log given as pieces of any size, read once, in bounded memory.

    Args:
        first_line: the number of its first line, where it is a part of a file.
        advise: what helps against a CUDA out of memory, given its numbers and phase.
    """
    return judge(scan(chunks, first_line=first_line), advise=advise)


def diagnose_lines(lines: Iterable[str]) -> Diagnosis:
    """Diagnose lines of text, with or without their line ends."""
    return diagnose_chunks(line.rstrip("\n").encode("utf-8", "replace") + b"\n" for line in lines)
