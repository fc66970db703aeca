"""What verl measured, a row a step, read from ``metrics.jsonl`` while it is being written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]

_FIRST_OF = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    # The KL to the reference model where there is one, else to the policy before the update.
    "kl": ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
    "entropy": ("actor/entropy",),
    "value_loss": ("critic/vf_loss",),
    "response_length": ("response_length/mean",),
    "seconds": ("timing_s/step", "perf/time_per_step"),
}
"""verl's metric names behind each column, the best first."""


@dataclass(frozen=True)
class StepRow:
    """One step. A value verl did not report (no critic, no validation) is None.

    ``reward`` is the mean score before any KL penalty; ``accuracy`` the mean of the greedy
    validation's core metric over data sources, with one of GSM8K's scorer 0 or 1 an answer;
    ``response_length`` is in tokens; ``seconds`` is the whole step.
    """

    step: int
    reward: float | None = None
    accuracy: float | None = None
    kl: float | None = None
    entropy: float | None = None
    value_loss: float | None = None
    response_length: float | None = None
    seconds: float | None = None

    @property
    def trained(self) -> bool:
        """False for the row of the validation before the first step."""
        return self.reward is not None or self.seconds is not None


def row(step: int, data: Mapping[str, Any]) -> StepRow:
    """The row of one record's metrics."""
    picked = {name: _first(data, keys) for name, keys in _FIRST_OF.items()}
    return StepRow(step=step, accuracy=_accuracy(data), **picked)


def _first(data: Mapping[str, Any], keys: Iterable[str]) -> float | None:
    for key in keys:
        value = data.get(key)
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _accuracy(data: Mapping[str, Any]) -> float | None:
    values = [
        float(value)
        for key, value in data.items()
        if key.startswith("val-core/")
        and key.rsplit("/", 1)[-1].startswith("mean@")
        and isinstance(value, (int, float))
    ]
    return sum(values) / len(values) if values else None


def parse(line: bytes) -> tuple[int, Record] | None:
    """``(step, metrics)`` of one line, or None where it is not a whole record."""
    try:
        record = json.loads(line)
        return int(record["step"]), dict(record["data"])
    except (ValueError, KeyError, TypeError):
        return None


@dataclass
class Tail:
    """Reads whole new lines of a growing file; a half-written last line waits for its end.

    The file may be rotated meanwhile: moved away, after which it is read on until there is a new
    one under its name, or cut to nothing where it is (logrotate's ``copytruncate``).
    """

    path: Path
    offset: int = 0
    _start: int = field(default=0, init=False)
    """Where in the open file what belongs to this reader begins."""
    _rest: bytes = field(default=b"", init=False)
    _file: BinaryIO | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._start = self.offset

    def lines(self) -> list[bytes]:
        """Lines completed since the last call, without their newlines."""
        if self._file is None and not self._open():
            return []
        chunk = self._read()
        if self._is_moved() and self._open():
            self.offset = self._start = 0
            chunk += self._read()
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        return whole

    def rest(self) -> bytes:
        """The unfinished last line: at the end of a killed process, its last words."""
        return self._rest

    def all(self) -> bytes:
        """What has been read and is still in the file; after a rotation, of the newer file."""
        if self._file is None:
            return b""
        self._file.seek(self._start)
        return self._file.read()

    def close(self) -> None:
        """Close the file, which the next :meth:`lines` would open again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False
        self.close()
        self._file = file
        return True

    def _read(self) -> bytes:
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self.offset:
            self.offset = self._start = 0
        self._file.seek(self.offset)
        chunk = self._file.read()
        self.offset += len(chunk)
        return chunk

    def _is_moved(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


class History:
    """All steps of a run, by number. A step's records merge: validation comes on its own."""

    def __init__(self) -> None:
        self._data: dict[int, Record] = {}

    @classmethod
    def read(cls, path: Path) -> History:
        history = cls()
        tail = Tail(path)
        history.extend(tail.lines())
        tail.close()
        return history

    def extend(self, lines: Iterable[bytes]) -> list[StepRow]:
        """Take in lines; the rows they changed, in order. Damaged lines are passed over."""
        changed: dict[int, None] = {}
        for line in lines:
            parsed = parse(line)
            if parsed is not None:
                step, data = parsed
                self._data.setdefault(step, {}).update(data)
                changed[step] = None
        return [row(step, self._data[step]) for step in changed]

    def rows(self) -> list[StepRow]:
        return [row(step, self._data[step]) for step in sorted(self._data)]

    def trained_rows(self) -> list[StepRow]:
        return [r for r in self.rows() if r.trained]

    @property
    def last_step(self) -> int:
        """The last step that was trained; 0 before the first."""
        rows = self.trained_rows()
        return rows[-1].step if rows else 0


def cut_after(path: Path, step: int) -> int:
    """Drop records of later steps, damaged lines and a half-written last line.

    A run that goes on from a checkpoint writes those steps again. Returns the last step that
    was dropped, 0 for none. The file is replaced in one rename.
    """
    if not path.exists():
        return 0
    kept, dropped = [], 0
    raw = path.read_bytes()
    for line in raw.split(b"\n"):
        parsed = parse(line)
        if parsed is None:
            continue
        if parsed[0] <= step:
            kept.append(line)
        else:
            dropped = max(dropped, parsed[0])
    wanted = b"".join(line + b"\n" for line in kept)
    if wanted != raw:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(wanted)
        temporary.replace(path)
    return dropped
