"""What follows a failed attempt: another one, on a lower rung or after a while, or the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_p40.errors import UsageError
from verl_p40.train.ladder import OUT_OF_MEMORY, Rung
from verl_p40.train.supervise import Outcome

RETRIES = "VERL_P40_RETRIES"
"""The variable that holds how often to try again without getting further; 0 never tries again."""
DEFAULT_RETRIES = 3

FIRST_WAIT, LONGEST_WAIT = 5.0, 300.0
"""Seconds before the first try; doubled for each that got no further."""

_PASSING = frozenset(
    {
        "hang",
        "sigkill-suspected",
        "killed",
        "abort",
        "segfault",
        "bus-error",
        "ray-host-oom",
        "kernel-oom-kill",
        "ray-start",
        "port-in-use",
        "nccl-network",
        "nccl-system",
        "nccl-timeout",
        "nccl-connect",
        "xid-79",
        "xid-software",
        "xid-other",
    }
)
"""Kinds of failure that may not come again, even where not a single step was trained."""

_LASTING = frozenset({"disk-full", "write-failed", "read-only", "permission-denied"})
"""Kinds that come again however far a run has got. The checkpoints that are there stay."""


@dataclass(frozen=True)
class Again:
    """Try again, after ``wait`` seconds and with one setting less greedy, if ``rung`` names one."""

    wait: float
    rung: Rung | None = None


@dataclass(frozen=True)
class Stop:
    """End the run. ``why``, where more than the failure is to be said."""

    why: str = ""


@dataclass
class Recovery:
    """Decides, over all attempts of one command."""

    retries: int
    _tries: int = 0
    _furthest: int = -1
    _failed: set[tuple[str, int]] = field(default_factory=set)

    def decide(
        self, outcome: Outcome, from_step: int, lower: Callable[[], Rung | None]
    ) -> Again | Stop:
        """What to do about a failed attempt.

        Args:
            from_step: the step it went on from.
            lower: the ladder's next rung.
        """
        failure = outcome.failure
        if self.retries == 0 or failure is None:
            return Stop()
        if failure.kind.startswith(OUT_OF_MEMORY):
            rung = lower()
            if rung is not None:
                return Again(0.0, rung)
            return Stop("nothing is left that would lower its memory and keep the checkpoints")
        if failure.kind in _LASTING or not _may_pass(outcome, from_step):
            return Stop()
        seen = (failure.kind or failure.headline, outcome.step)
        if seen in self._failed:
            return Stop(f"the same failure twice at step {outcome.step}")
        self._failed.add(seen)
        if outcome.step > self._furthest:
            self._furthest, self._tries = outcome.step, 0
        if self._tries == self.retries:
            return Stop(f"{self.retries + 1} attempts got no further than step {self._furthest}")
        wait = min(FIRST_WAIT * 2**self._tries, LONGEST_WAIT)
        self._tries += 1
        return Again(wait)


def _may_pass(outcome: Outcome, from_step: int) -> bool:
    """A run that trained a step has the right settings; what stopped it may not come again."""
    failure = outcome.failure
    passing = failure is not None and failure.kind in _PASSING
    return outcome.step > from_step or outcome.signalled or passing


def retries(asked: int | None) -> int:
    """How often to try again: ``--retries``, ``VERL_P40_RETRIES`` or the default.

    Raises:
        UsageError: no whole number of at least 0.
    """
    text = os.environ.get(RETRIES, "").strip()
    if asked is None and not text:
        return DEFAULT_RETRIES
    try:
        number = int(text) if asked is None else asked
    except ValueError:
        number = -1
    if number < 0:
        where, given = ("--retries", str(asked)) if asked is not None else (RETRIES, repr(text))
        raise UsageError(
            f"{where} is {given}, and must be a whole number of at least 0", fix="--retries 3"
        )
    return number
