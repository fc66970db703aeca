"""How long work shows itself: bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

PLAIN_EVERY = 5.0
"""Seconds between two plain lines of a download."""


class Report(Protocol):
    """What an installer tells. Calls come from several threads."""

    def say(self, text: str) -> None:
        """One line about the stage that begins or has ended."""

    def begin(self, files: int, total: int, done: int) -> None:
        """A download of ``files`` files, ``total`` bytes, of which ``done`` are here already."""

    def advance(self, filename: str, size: int) -> None:
        """``size`` more bytes of a file (negative when a broken part was thrown away)."""

    def finished(self, filename: str) -> None:
        """A file is complete and its hash is right."""

    def end(self) -> None:
        """The download is over, well or not."""


class Silent:
    """Says nothing (``--json``, tests)."""

    def say(self, text: str) -> None:
        pass

    def begin(self, files: int, total: int, done: int) -> None:
        pass

    def advance(self, filename: str, size: int) -> None:
        pass

    def finished(self, filename: str) -> None:
        pass

    def end(self) -> None:
        pass


def _seconds(value: float) -> str:
    return f"{int(value) // 60}:{int(value) % 60:02d}"


class ConsoleReport:
    """Writes to ``console`` (standard error by default, so that results stay pipeable)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._lock = threading.RLock()
        self._bars: Progress | None = None
        self._overall: TaskID | None = None
        self._rows: dict[str, TaskID] = {}
        self._files = self._files_done = 0
        self._total = self._bytes = self._first_bytes = 0
        self._started = self._last_line = 0.0

    def __enter__(self) -> ConsoleReport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def say(self, text: str) -> None:
        self._console.print(escape(text))

    def begin(self, files: int, total: int, done: int) -> None:
        with self._lock:
            self._files, self._files_done = files, 0
            self._total, self._bytes, self._first_bytes = total, done, done
            self._started = self._last_line = time.monotonic()
            if not self._console.is_terminal:
                return
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._overall = self._bars.add_task("downloading", total=total, completed=done)
            self._bars.start()

    def advance(self, filename: str, size: int) -> None:
        with self._lock:
            self._bytes += size
            # A server that tells no size only shows when its bytes arrive.
            self._total = max(self._total, self._bytes)
            if self._bars is not None and self._overall is not None:
                if filename not in self._rows:
                    self._rows[filename] = self._bars.add_task(f"  {filename[:40]}", total=None)
                self._bars.update(self._rows[filename], advance=size)
                self._bars.update(self._overall, completed=self._bytes, total=self._total)
            elif time.monotonic() - self._last_line >= PLAIN_EVERY:
                self._last_line = time.monotonic()
                self._console.print(escape(self._plain_line()))

    def finished(self, filename: str) -> None:
        with self._lock:
            self._files_done += 1
            if self._bars is not None and self._overall is not None:
                if filename in self._rows:
                    self._bars.remove_task(self._rows.pop(filename))
                self._bars.update(
                    self._overall, description=f"{self._files_done}/{self._files} files"
                )

    def end(self) -> None:
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
                self._bars, self._overall, self._rows = None, None, {}

    def _plain_line(self) -> str:
        spent = max(time.monotonic() - self._started, 0.001)
        speed = max(self._bytes - self._first_bytes, 0) / spent
        left = (self._total - self._bytes) / speed if speed else 0.0
        return (
            f"downloaded {decimal(self._bytes)} of {decimal(self._total)}, "
            f"{self._files_done}/{self._files} files, {decimal(int(speed))}/s, "
            f"{_seconds(left)} left"
        )
