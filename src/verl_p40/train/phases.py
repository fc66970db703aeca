"""Which part of its start or step the trainer is in, read from what verl and Ray print."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verl_p40.train.failures import clean

_LOOP = re.compile(r"Training Progress")
"""The bar that verl draws as its training loop begins, and at each step."""

_MARKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Started a local Ray instance"), "loading verl"),
    (re.compile(r"TaskRunner hostname"), "loading verl"),
    (re.compile(r"Using dataset class"), "reading the data"),
    (re.compile(r"All configuration checks passed"), "starting the workers"),
    (re.compile(r"Total training steps: \d+"), "starting the workers"),
    (re.compile(r"Model config after override"), "loading the models"),
    (re.compile(r"Critic overriding config"), "loading the models"),
    (re.compile(r"Resuming from"), "loading the checkpoint"),
    (re.compile(r"Training from scratch"), "generating"),
    (re.compile(r"test_gen_batch meta info"), "validating"),
    (re.compile(r"Initial validation metrics"), "training"),
    (_LOOP, "training"),
    (re.compile(r"local_global_step_folder"), "saving a checkpoint"),
)
_TOTAL = re.compile(r"Total training steps: (\d+)")
_AFTER_STEP = "training"


@dataclass
class Phases:
    """Follows the log. ``current`` is what the trainer is doing now."""

    current: str = "starting Ray"
    total: int | None = field(default=None)
    """verl's own count of steps, once it has printed it."""
    stepping: bool = False
    """Whether the training loop has begun."""

    def feed(self, line: bytes) -> bool:
        """Take in one line of the log. True when it says that something was got on with."""
        text = clean(line.decode("utf-8", "replace"))
        match = _TOTAL.search(text)
        if match:
            self.total = int(match.group(1))
        for pattern, phase in _MARKS:
            if pattern.search(text):
                self.current = phase
                self.stepping = self.stepping or pattern is _LOOP
                return True
        return match is not None

    def step_done(self) -> None:
        self.current, self.stepping = _AFTER_STEP, True
