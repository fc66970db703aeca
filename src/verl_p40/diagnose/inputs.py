"""Where a log comes from: a file, a run folder, standard input."""

from __future__ import annotations

import codecs
import gzip
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from verl_p40.diagnose.attempts import Attempt, to_diagnose
from verl_p40.diagnose.attempts import read as read_attempts
from verl_p40.errors import DataError
from verl_p40.train.failures import DISK_FULL
from verl_p40.train.folder import RunFolder

_CHUNK = 1 << 20
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_TEXT_SHARE = 0.7
"""Bytes of the first chunk that must look like text."""


@dataclass(frozen=True)
class Source:
    """A log that can be read once. ``name`` is how evidence names it; ``run`` its folder."""

    name: str
    path: Path | None
    run: RunFolder | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def attempt(self) -> Attempt | None:
        """Of a run's attempts the one that is read; None: the whole log is."""
        return to_diagnose(self.attempts)

    @property
    def first_line(self) -> int:
        return self.attempt.line if self.attempt else 1

    @contextmanager
    def chunks(self) -> Iterator[Iterator[bytes]]:
        """The bytes as UTF-8 (a gzip or UTF-16 file is decoded), in pieces.

        Raises:
            DataError: it cannot be read, is empty, or is no text.
        """
        try:
            if self.path is None:
                yield _decoded(sys.stdin.buffer, self.name)
            else:
                with self.path.open("rb") as file:
                    part = self.attempt
                    if part is not None:
                        file.seek(part.start)
                        yield chain(_part(file, part.stop - part.start), _noted(part))
                    else:
                        yield _decoded(file, self.name)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror or error}") from error
        except EOFError as error:
            raise DataError(f"{self.name} cannot be read: the gzip file is cut off") from error


def find(target: str | None, *, runs: Path) -> Source:
    """What ``target`` names: ``-`` is standard input, a folder a run, nothing the newest run.

    Raises:
        DataError: there is no such file, or the folder holds no log.
    """
    if target == "-":
        return Source("standard input", None)
    if target is None:
        return _newest(runs)
    path = Path(target)
    if path.is_dir():
        return _of_run(path)
    if not path.exists():
        if (runs / target).is_dir() and os.sep not in target:
            return _of_run(runs / target)
        raise DataError(
            f"there is no file or run folder {target}",
            fix="give a log file, a run folder, or - for standard input",
        )
    return Source(target, path)


def _of_run(path: Path) -> Source:
    run = RunFolder(path)
    if not run.log.is_file():
        raise DataError(
            f"{path} is no run folder: it has no {run.log.name}",
            fix="give the log file itself, or pipe it: docker compose logs train | verl-p40 diagnose -",
        )
    return Source(str(run.log), run.log, run, read_attempts(run))


def _newest(runs: Path) -> Source:
    logs = [path for path in runs.glob("*/train.log") if path.is_file()] if runs.is_dir() else []
    if not logs:
        raise DataError(
            f"there is no run in {runs}",
            fix="give a log file, a run folder, or - for standard input",
        )
    return _of_run(max(logs, key=lambda path: path.stat().st_mtime).parent)


def _part(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := file.read(min(_CHUNK, size))):
        size -= len(chunk)
        yield chunk


def _noted(attempt: Attempt) -> Iterator[bytes]:
    """What the supervisor could only write into the events: the log had no room for it."""
    if attempt.error == DISK_FULL:
        yield f"\n{DISK_FULL}\n".encode()


def _decoded(file: BinaryIO, name: str) -> Iterator[bytes]:
    first = file.read(_CHUNK)
    if not first:
        raise DataError(f"{name} is empty", fix="the program wrote nothing, or to another file")
    if first[:2] == b"\x1f\x8b":
        return _gzipped(file, first, name)
    return _text(file, first, name)


def _gzipped(file: BinaryIO, first: bytes, name: str) -> Iterator[bytes]:
    unpacked = cast(BinaryIO, gzip.GzipFile(fileobj=cast(BinaryIO, _Joined(first, file))))
    return _text(unpacked, unpacked.read(_CHUNK), name)


class _Joined:
    """A file whose first bytes have been read already; standard input cannot seek."""

    def __init__(self, first: bytes, rest: BinaryIO) -> None:
        self._first, self._rest = first, rest

    def read(self, size: int = -1) -> bytes:
        if self._first:
            size = len(self._first) if size < 0 else size
            part, self._first = self._first[:size], self._first[size:]
            return part
        return self._rest.read(size)


def _text(file: BinaryIO, first: bytes, name: str) -> Iterator[bytes]:
    encoding = _UTF16.get(first[:2])
    if encoding:
        return _recoded(file, first[2:], encoding)
    sample = first[:65536]
    printable = sum(byte >= 32 or byte in (8, 9, 10, 12, 13, 27) for byte in sample)
    if printable < _TEXT_SHARE * len(sample):
        raise DataError(f"{name} is no text", fix="give the log, not a checkpoint or an archive")
    return _rest(file, first)


def _rest(file: BinaryIO, first: bytes) -> Iterator[bytes]:
    chunk = first
    while chunk:
        yield chunk
        chunk = file.read(_CHUNK)


def _recoded(file: BinaryIO, first: bytes, encoding: str) -> Iterator[bytes]:
    """PowerShell's ``>`` writes UTF-16."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for chunk in _rest(file, first):
        yield decoder.decode(chunk).encode()
