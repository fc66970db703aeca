"""Installing and preparing, told through the run's own view."""

from __future__ import annotations

import threading
import time

from rich.filesize import decimal

from verl_p40.train.view import View


class ViewReport:
    """An install's report (:class:`verl_p40.stack.progress.Report`). Calls come from threads."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._files = self._files_done = 0
        self._next = 0.0

    def say(self, text: str) -> None:
        with self._lock:
            self._view.note(text)

    def begin(self, files: int, total: int, done: int) -> None:
        with self._lock:
            self._files, self._files_done = files, 0
            self._total, self._done = total, done
            self._show()

    def advance(self, filename: str, size: int) -> None:
        with self._lock:
            self._done += size
            if time.monotonic() >= self._next:
                self._show()

    def finished(self, filename: str) -> None:
        with self._lock:
            self._files_done += 1

    def end(self) -> None:
        with self._lock:
            self._view.phase("installing the training stack")

    def _show(self) -> None:
        self._next = time.monotonic() + self._view.patience
        of = f" of {decimal(self._total)}" if self._total else ""
        self._view.phase(
            f"downloading the training stack: {decimal(self._done)}{of}, "
            f"{self._files_done} of {self._files} files"
        )


class DataProgress:
    """Progress of making a data set: ``(what, fraction done or None)``."""

    def __init__(self, kind: str, view: View) -> None:
        self._kind, self._view, self._next = kind, view, 0.0

    def __call__(self, text: str, fraction: float | None) -> None:
        now = time.monotonic()
        if fraction is None or now >= self._next:
            self._next = now + self._view.patience
            done = "" if fraction is None else f" ({100 * fraction:.0f} %)"
            self._view.phase(f"preparing the {self._kind} data: {text}{done}")


class ModelProgress:
    """Progress of downloading a model: ``(what, fraction done or None)``."""

    def __init__(self, view: View) -> None:
        self._view, self._next = view, 0.0

    def __call__(self, text: str, fraction: float | None) -> None:
        now = time.monotonic()
        if fraction is None or now >= self._next:
            self._next = now + self._view.patience
            done = "" if fraction is None else f" ({100 * fraction:.0f} %)"
            # The name comes first, then what changes: one phase to a view.
            self._view.phase(text.replace(", ", ": ", 1) + done)
