"""How a push or a pull shows itself: a bar a layer on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

PLAIN_EVERY = 5.0
"""Seconds between two plain lines about the bytes."""

DONE = ("Pull complete", "Already exists", "Pushed", "Layer already exists", "Mounted from")
_RETRY = re.compile(r"Retrying in \d+ seconds?")


class Bars:
    """Writes to standard error. One object a transfer; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._rows: dict[str, TaskID] = {}
        self._phase: dict[str, str] = {}
        self._bytes: dict[str, tuple[int, int]] = {}
        self._last = time.monotonic()

    def __enter__(self) -> Bars:
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.fields[layer]}", markup=False),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(escape(text))

    def layer(self, name: str, status: str, current: int, total: int) -> None:
        before = self._phase.get(name)
        self._phase[name] = status
        if total:
            self._bytes[name] = (current, total)
        if self._bars is not None:
            self._show(name, status, current, total)
        elif status.startswith(DONE):
            if before != status:
                size = self._bytes.get(name, (0, 0))[1]
                done = sum(state.startswith(DONE) for state in self._phase.values())
                about = f", {decimal(size)}" if size else ""
                self.say(f"{name}: {status.lower()}{about} ({done} of {len(self._phase)} layers)")
        elif _RETRY.fullmatch(status):
            # The engine counts down second by second; the first of each countdown says it all.
            if before is None or not _RETRY.fullmatch(before) or _wait(status) > _wait(before):
                self.say(f"{name}: {status[0].lower()}{status[1:]}")
        elif time.monotonic() - self._last >= PLAIN_EVERY:
            self._last = time.monotonic()
            got = sum(current for current, _ in self._bytes.values())
            whole = sum(total for _, total in self._bytes.values())
            self.say(f"{status.lower()}: {decimal(got)} of {decimal(whole)}")

    def _show(self, name: str, status: str, current: int, total: int) -> None:
        assert self._bars is not None
        if name not in self._rows:
            self._rows[name] = self._bars.add_task(status, total=None, layer=name[:12])
        row = self._rows[name]
        if status.startswith(DONE):
            size = self._bytes.get(name, (0, 0))[1]
            self._bars.update(row, description=status, total=size or 1, completed=size or 1)
        elif total:
            # A push counts headers of the archive too and may pass its own total.
            self._bars.update(row, description=status, total=max(total, current), completed=current)
        else:
            self._bars.update(row, description=status)


def _wait(status: str) -> int:
    return int(re.sub(r"\D", "", status) or 0)
