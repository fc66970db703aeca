"""A stop in order: the step in progress is finished and saved, within a time.

verl is asked by a file (``VERL_STOP_FILE``, the patch ``stop-on-request``), which it looks for once
a step. The file is in the attempt's own temporary folder, so that no later attempt can find it.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from verl_p40.errors import UsageError
from verl_p40.train.process import Interrupt
from verl_p40.train.view import View

STOP_FILE = "VERL_STOP_FILE"
"""The variable by which verl learns the file's name."""

GRACE = "VERL_P40_STOP_GRACE"
"""The variable that holds how long, in seconds, a stop may take; 0 stops at once."""

DEFAULT_GRACE = 120.0
"""Seconds. On a P40 a step takes about 17 s and a 12 GB checkpoint half a minute."""


def file_in(folder: Path) -> Path:
    """The file that asks the attempt whose temporary folder this is."""
    return folder / "stop"


def grace() -> float:
    """How long a stop may take, in seconds: ``VERL_P40_STOP_GRACE``, or the default.

    Raises:
        UsageError: the variable holds no number of seconds.
    """
    text = os.environ.get(GRACE, "").strip()
    if not text:
        return DEFAULT_GRACE
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(
            f"{GRACE} is {text!r}, and must be a number of seconds", fix=f"{GRACE}=120"
        )
    return seconds


@dataclass
class OrderlyStop:
    """Decides, once a signal has come, how long the trainer may go on."""

    file: Path
    """Made to ask verl."""
    grace: float
    """Seconds."""
    saves: bool
    """Whether the run writes checkpoints: without them there is nothing to wait for."""
    banner: str = ""
    """What is being done, once a stop was asked for."""
    _deadline: float = math.inf

    def is_over(self, interrupt: Interrupt, *, stepping: bool, view: View) -> bool:
        """Whether the trainer is to be ended now. Called in every turn of the supervisor.

        Args:
            stepping: whether verl's training loop has begun. Before, there is nothing to save.
        """
        if not interrupt.asked:
            return False
        if not self.banner:
            self._begin(interrupt, stepping, view)
        return interrupt.again or time.monotonic() >= self._deadline

    def _begin(self, interrupt: Interrupt, stepping: bool, view: View) -> None:
        self._deadline = time.monotonic()
        self.banner = f"stopping ({interrupt.name})"
        if stepping and self.saves and self.grace > 0 and self._ask():
            self._deadline += self.grace
            self.banner = "stopping after this step, saving a checkpoint"
            view.note(
                f"{interrupt.name}: {self.banner}, {self.grace:.0f} s at most "
                "(Ctrl-C again to stop at once)"
            )

    def _ask(self) -> bool:
        try:
            self.file.touch()
        except OSError:
            return False
        return True
