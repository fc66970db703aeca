"""What an armed tripwire leaves in the run folder, for the supervisor to read. No torch here."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TRIP = "tripwire.json"
"""One line of JSON about the first half-precision tensor of the run."""
ARMED = "tripwire"
"""Folder with one file a process: how many operators it has checked."""
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class Trip:
    """The first half-precision tensor.

    ``made`` and ``inputs`` spell tensors as ``bfloat16[4, 96]``; ``site`` is ``file:line
    function`` of the innermost frame outside torch, ``via`` the innermost frame of verl when
    that is another one.
    """

    operator: str
    made: tuple[str, ...]
    inputs: tuple[str, ...]
    site: str
    via: str
    role: str
    pid: int

    def line(self) -> str:
        """The one line that the run ends with."""
        inputs = f" from {', '.join(self.inputs)}" if self.inputs else ""
        via = f" (via {self.via})" if self.via else ""
        return (
            f"half precision in {self.role}: {self.operator} made {', '.join(self.made)}"
            f"{inputs} at {self.site}{via}"
        )


def write_trip(folder: Path, trip: Trip) -> bool:
    """Write the trip, whole, unless an earlier one is there. True when it was written."""
    temporary = folder / f".{TRIP}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(asdict(trip)) + "\n", encoding="utf-8")
    try:
        os.link(temporary, folder / TRIP)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def read_trip(folder: Path) -> Trip | None:
    """The trip of the run in ``folder``, or None."""
    try:
        data: dict[str, Any] = json.loads((folder / TRIP).read_text(encoding="utf-8"))
        data["made"], data["inputs"] = tuple(data["made"]), tuple(data["inputs"])
        return Trip(**data)
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Counter:
    """How many operators this process has checked; making one says that it is armed.

    Eight bytes in a file mapped into memory: they are the kernel's once written, so the count is
    exact also for a worker that ends with a kill, as Ray's do, and a write costs no system call.
    """

    def __init__(self, folder: Path) -> None:
        place = folder / ARMED
        place.mkdir(exist_ok=True)
        temporary = place / f".{os.getpid()}.tmp"
        temporary.write_bytes(_COUNT.pack(0))
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _COUNT.size)
        temporary.replace(place / f"{os.getpid()}.count")

    def write(self, operators: int) -> None:
        """Note the number of operators checked so far."""
        _COUNT.pack_into(self._map, 0, operators)


def _counts(folder: Path) -> list[int]:
    counts = []
    for path in (folder / ARMED).glob("*.count"):
        with contextlib.suppress(OSError, struct.error):
            counts.append(int(_COUNT.unpack(path.read_bytes())[0]))
    return counts


def armed(folder: Path) -> bool:
    """True when at least one process has armed the tripwire."""
    return bool(_counts(folder))


def operators(folder: Path) -> int:
    """Operators checked by all processes so far."""
    return sum(_counts(folder))


def clear(folder: Path) -> None:
    """Remove the traces of an earlier attempt."""
    (folder / TRIP).unlink(missing_ok=True)
    for path in (folder / ARMED).glob("*"):
        path.unlink(missing_ok=True)
