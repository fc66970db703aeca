"""A window on bytes that says clearly when something reaches beyond its end."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Any


class Damaged(Exception):
    """The content contradicts its own format: one line that says what, and at which offset."""


@dataclass(frozen=True)
class View:
    """``data[start:end]``, read in place: nothing is copied but what is asked for.

    Every offset below is relative to ``start``, in bytes.
    """

    data: bytes | mmap.mmap
    start: int
    end: int

    @classmethod
    def whole(cls, data: bytes | mmap.mmap) -> View:
        return cls(data, 0, len(data))

    def __len__(self) -> int:
        return self.end - self.start

    def sub(self, offset: int, size: int, what: str) -> View:
        """The window of ``size`` bytes at ``offset``.

        Raises:
            Damaged: it reaches beyond this one; ``what`` names it.
        """
        if offset < 0 or size < 0 or offset + size > len(self):
            raise Damaged(
                f"{what} at byte {offset} has {size} bytes, {max(len(self) - offset, 0)} are left"
            )
        return View(self.data, self.start + offset, self.start + offset + size)

    def unpack(self, layout: str, offset: int, what: str) -> tuple[Any, ...]:
        """``struct.unpack`` at ``offset``; raises :class:`Damaged` beyond the end."""
        size = struct.calcsize(layout)
        if offset < 0 or offset + size > len(self):
            raise Damaged(f"{what} at byte {offset} is cut off")
        return struct.unpack_from(layout, self.data, self.start + offset)

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """At most ``size`` bytes from ``offset`` on, as far as there are any."""
        stop = self.end if size is None else min(self.start + offset + size, self.end)
        return bytes(self.data[self.start + offset : stop])

    def find(self, pattern: bytes, offset: int = 0) -> int:
        """Where ``pattern`` is next, at or after ``offset``; -1 where it is not."""
        found = self.data.find(pattern, self.start + offset, self.end)
        return -1 if found < 0 else found - self.start

    def text(self, offset: int, what: str) -> str:
        """The NUL-terminated string at ``offset``."""
        stop = self.find(b"\0", offset)
        if offset > len(self) or stop < 0:
            raise Damaged(f"{what} at byte {offset} has no end")
        return self.read(offset, stop - offset).decode("utf-8", "replace")
