"""A CSV file that grows by whole lines, mends itself after a crash, and stays within a size."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 64 * 1024 * 1024
"""A file is set aside when it has grown to this. docs/monitor.md says how long that takes."""
KEEP = 4
"""How many set-aside files stay; with the current one at most 320 MiB a table."""

Cell = str | int | float | None


def segments(path: Path) -> list[Path]:
    """The set-aside files of a table and the current one, oldest first: ``gpu.2.csv gpu.1.csv
    gpu.csv``. Every one has a header of its own."""
    aside = [_aside(path, number) for number in range(KEEP, 0, -1)]
    return [one for one in (*aside, path) if one.is_file()]


class CsvLog:
    """Appends rows to ``path``, which is opened anew for each: it may be moved or removed.

    Args:
        columns: the header. A file with another one is set aside.
        max_bytes, keep: see :data:`MAX_BYTES` and :data:`KEEP`.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        *,
        max_bytes: int = MAX_BYTES,
        keep: int = KEEP,
    ) -> None:
        self.path, self._columns = path, tuple(columns)
        self._max_bytes, self._keep = max_bytes, keep
        self._checked = False

    def append(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Write rows: all of them or none. None is an empty cell.

        Raises:
            OSError: the file cannot be written; on a full disk nothing of the rows is left in it.
        """
        if not self._checked:
            self._mend()
            self._checked = True
        fd = self._open()
        try:
            size = os.fstat(fd).st_size
            if size >= self._max_bytes:
                os.close(fd)
                fd = -1
                self._set_aside()
                fd = self._open()
                size = os.fstat(fd).st_size
            lines = rows if size else [self._columns, *rows]
            _write_all(fd, _text(lines).encode(), size)
        finally:
            if fd >= 0:
                os.close(fd)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self.path, flags, 0o644)

    def _mend(self) -> None:
        """Cut off a last line that a crash left unfinished; set aside what has other columns."""
        try:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                end = _end_of_last_line(file, size)
                if end < size:
                    file.truncate(end)
                file.seek(0)
                header = file.readline()
        except FileNotFoundError:
            return
        if header and header != _text([self._columns]).encode():
            self._set_aside()

    def _set_aside(self) -> None:
        for number in range(self._keep, 0, -1):
            newer = _aside(self.path, number - 1) if number > 1 else self.path
            if newer.exists():
                newer.replace(_aside(self.path, number))


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _end_of_last_line(file: io.BufferedRandom, size: int) -> int:
    """The offset behind the last newline; 0 where there is none."""
    end = size
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def _write_all(fd: int, data: bytes, size: int) -> None:
    """One write; what a full disk let through of it is taken back."""
    try:
        written = os.write(fd, data)
    except OSError:
        os.ftruncate(fd, size)
        raise
    if written < len(data):
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _text(rows: Sequence[Sequence[Cell]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        ["" if cell is None else cell for cell in row] for row in rows
    )
    return out.getvalue()
