"""What a user sees of a run: a live table on a terminal, a line a step anywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from verl_p40.train.metrics import StepRow

_Format = Callable[[float], str]


def _fixed(digits: int) -> _Format:
    return lambda value: f"{value:.{digits}f}"


def _small(value: float) -> str:
    """Five characters or a few more of a value that spans decades (KL, loss)."""
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.1e}"


_COLUMNS: tuple[tuple[str, str, int, _Format], ...] = (
    ("step", "step", 5, lambda v: f"{v:.0f}"),
    ("reward", "reward", 7, _fixed(3)),
    ("accuracy", "greedy acc", 10, _fixed(3)),
    ("kl", "KL", 8, _small),
    ("entropy", "entropy", 8, _fixed(3)),
    ("value_loss", "value loss", 10, _small),
    ("response_length", "length", 7, _fixed(1)),
    ("seconds", "s/step", 7, _fixed(2)),
)
"""Field of :class:`StepRow`, heading, width in characters, format."""

_RSS_WIDTH = 8
_HEADING_EVERY = 20


def cells(row: StepRow, rss: int) -> list[str]:
    """The cells of a row; empty where verl reported nothing. ``rss`` is in bytes."""
    out = []
    for field, _, _, form in _COLUMNS:
        value = getattr(row, field)
        out.append("" if value is None else form(value))
    out.append(gigabytes(rss))
    return out


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size else ""


def clock(seconds: float) -> str:
    """``1:05`` or ``2:03:09``."""
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class View(Protocol):
    """Where the supervisor reports to."""

    patience: float
    """Seconds to leave between two phases that only count up."""

    def note(self, text: str) -> None:
        """Say one line that stays."""

    def phase(self, text: str) -> None:
        """Say what is being done now."""

    def step(self, row: StepRow, *, total: int | None, rss: int) -> None:
        """Show a finished step. ``rss`` is the resident memory of all processes, in bytes."""

    def tick(self, *, rss: int) -> None:
        """Called a few times a second."""

    def close(self) -> None:
        """End the live part; what was shown stays."""


class PlainView:
    """One aligned line a step, for logs and pipes."""

    patience = 10.0

    def __init__(self, console: Console, *, silence: float = 60.0) -> None:
        """``silence``: seconds after which what goes on is said again."""
        self._console = console
        self._silence = silence
        self._lines = 0
        self._phase = ""
        self._phase_since = self._said = time.monotonic()
        self._shown: dict[int, list[str]] = {}

    def note(self, text: str) -> None:
        self._print(text)

    def phase(self, text: str) -> None:
        if text != self._phase:
            if text.split(":")[0] != self._phase.split(":")[0]:
                self._phase_since = time.monotonic()
            self._phase = text
            if self._lines == 0:
                self._print(f"{text}...")

    def step(self, row: StepRow, *, total: int | None, rss: int) -> None:
        self._phase_since = time.monotonic()
        row_cells = cells(row, rss)
        if self._shown.get(row.step) == row_cells[:-1]:
            return
        self._shown = {row.step: row_cells[:-1]}
        if self._lines % _HEADING_EVERY == 0:
            heads = [name.rjust(width) for _, name, width, _ in _COLUMNS]
            self._print("  ".join([*heads, "RSS".rjust(_RSS_WIDTH)]))
        self._lines += 1
        widths = [width for _, _, width, _ in _COLUMNS] + [_RSS_WIDTH]
        pairs = zip(row_cells, widths, strict=True)
        self._print("  ".join(cell.rjust(width) for cell, width in pairs))

    def tick(self, *, rss: int) -> None:
        now = time.monotonic()
        if now - self._said >= self._silence:
            self._print(f"{self._phase}... {clock(now - self._phase_since)}")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class LiveView:
    """A table of the last steps with a progress bar and the time left."""

    patience = 0.2

    def __init__(self, console: Console, *, rows: int = 15) -> None:
        self._console = console
        self._rows: deque[tuple[StepRow, list[str]]] = deque(maxlen=rows)
        self._seconds: deque[float] = deque(maxlen=10)
        self._phase = "starting"
        self._phase_since = self._started = time.monotonic()
        self._total: int | None = None
        self._rss = 0
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=8, transient=False
        )
        self._live.start()

    def note(self, text: str) -> None:
        self._live.console.print(escape(text))

    def phase(self, text: str) -> None:
        # "downloading: 3 of 9 files" goes on being the same work: its clock runs on.
        if text.split(":")[0] != self._phase.split(":")[0]:
            self._phase_since = time.monotonic()
        self._phase = text

    def step(self, row: StepRow, *, total: int | None, rss: int) -> None:
        self._total, self._rss = total, rss
        if self._rows and self._rows[-1][0].step == row.step:
            self._rows.pop()
        elif row.seconds is not None:
            self._seconds.append(row.seconds)
        self._rows.append((row, cells(row, rss)))

    def tick(self, *, rss: int) -> None:
        self._rss = rss

    def close(self) -> None:
        self._phase = ""
        self._live.stop()

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._rows:
            parts.append(self._table())
            parts.append(self._bar())
        if self._phase:
            now = time.monotonic()
            memory = f"  {gigabytes(self._rss)}" if self._rss else ""
            text = f"{self._phase}  {clock(now - self._phase_since)}  "
            text += f"[dim](total {clock(now - self._started)}{memory})[/]"
            self._spinner.update(text=Text.from_markup(text))
            parts.append(self._spinner)
        return Group(*parts)

    def _table(self) -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
        for _, name, width, _ in _COLUMNS:
            style = "bold green" if name in ("reward", "greedy acc") else ""
            table.add_column(name, justify="right", min_width=width, style=style, no_wrap=True)
        table.add_column("RSS", justify="right", min_width=_RSS_WIDTH, no_wrap=True)
        for _, row_cells in self._rows:
            table.add_row(*row_cells)
        return table

    def _bar(self) -> RenderableType:
        step = self._rows[-1][0].step
        grid = Table.grid(padding=(0, 1))
        total = self._total or 0
        left = ""
        if self._seconds and total > step:
            each = sum(self._seconds) / len(self._seconds)
            left = f"about {clock(each * (total - step))} left"
        bar = ProgressBar(total=total or None, completed=step, width=40)
        grid.add_row(bar, f"step {step}" + (f" of {total}" if total else ""), f"[dim]{left}[/]")
        return grid


def choose(console: Console) -> View:
    """The live table on a terminal, lines elsewhere."""
    return (
        LiveView(console)
        if console.is_terminal and not console.is_dumb_terminal
        else (PlainView(console))
    )
