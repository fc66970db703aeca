"""The attempts of one run folder: where each begins in train.log, and how it ended."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_p40.train.folder import RunFolder

_HEAD = b"=== verl-p40 "
"""What verl_p40.train writes into the log where an attempt begins."""
_BEGINS = ("start", "resume")
_ENDS = ("end", "stopped", "failure")


@dataclass(frozen=True)
class Attempt:
    """``start`` to ``stop`` are its bytes in the log, ``line`` the number of its first line.

    ``status`` is finished, stopped or failed; "" where it was killed before it could say. ``step``
    is the one it had reached, ``error`` what the supervisor noted.
    """

    number: int
    action: str
    time: str
    status: str
    step: int
    error: str
    start: int
    stop: int
    line: int

    @property
    def went_wrong(self) -> bool:
        return self.status not in ("finished", "stopped")

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "action": self.action,
            "time": self.time,
            "status": self.status or "killed",
            "step": self.step,
            "error": self.error or None,
            "first_line": self.line,
        }


def read(run: RunFolder) -> tuple[Attempt, ...]:
    """All attempts, oldest first; none where the folder's events do not tell them apart.

    Events and the log are paired from the newest back: a log may have been cut at its beginning.
    """
    told = _told(run.read_events())
    heads = _heads(run)
    pairs = list(zip(reversed(told), reversed(heads), strict=False))[::-1]
    size = run.log.stat().st_size
    found = []
    for number, (events, (start, line)) in enumerate(pairs):
        stop = pairs[number + 1][1][0] if number + 1 < len(pairs) else size
        ending = next((event for event in events if event["event"] in _ENDS), {})
        status = {"end": "finished", "stopped": "stopped", "failure": "failed"}
        found.append(
            Attempt(
                number=number + 1,
                action=str(events[0]["event"]),
                time=str(events[0].get("time", "")),
                status=status.get(str(ending.get("event", "")), ""),
                step=int(ending.get("step", events[-1].get("step", 0))),
                error=str(ending.get("error", "")),
                start=start,
                stop=stop,
                line=line,
            )
        )
    return tuple(found)


def to_diagnose(attempts: Sequence[Attempt]) -> Attempt | None:
    """The last one that went wrong, the last one where none did; None without any."""
    wrong = [attempt for attempt in attempts if attempt.went_wrong] or list(attempts)
    return wrong[-1] if wrong else None


def _told(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each attempt, its ``start`` or ``resume`` first."""
    told: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] in _BEGINS:
            told.append([event])
        elif told:
            told[-1].append(event)
    return told


def _heads(run: RunFolder) -> list[tuple[int, int]]:
    """Offset and line number of every attempt's first line."""
    if not run.log.stat().st_size:
        return []
    heads: list[tuple[int, int]] = []
    with run.log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        starts = [0] if log[: len(_HEAD)] == _HEAD else []
        at = log.find(b"\n" + _HEAD)
        while at >= 0:
            starts.append(at + 1)
            at = log.find(b"\n" + _HEAD, at + 1)
        line, counted = 1, 0
        for start in starts:
            line += _lines(log, counted, start)
            counted = start
            heads.append((start, line))
    return heads


def _lines(log: mmap.mmap, start: int, stop: int) -> int:
    """Line ends between two offsets, a megabyte at a time."""
    step = 1 << 20
    return sum(log[at : min(at + step, stop)].count(b"\n") for at in range(start, stop, step))
