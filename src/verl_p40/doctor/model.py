"""States, outcomes and checks, and the register that checks put themselves into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_p40.doctor.machine import Machine


class State(str, Enum):
    """From best to worst, ``NA`` aside: it says nothing about the machine."""

    OK = "ok"
    NOTE = "note"
    """Works; worth knowing."""
    WARNING = "warning"
    """Works for now, or in part, or slowly."""
    FAILURE = "failure"
    """Training on the card cannot work."""
    NA = "not applicable"


_ORDER = (State.NA, State.OK, State.NOTE, State.WARNING, State.FAILURE)


def worst(states: list[State]) -> State:
    return max(states, key=_ORDER.index, default=State.NA)


@dataclass(frozen=True)
class Outcome:
    """What a check found: ``text`` is the reason in one line, ``fix`` commands to paste.

    ``details`` are shown with ``-v``, ``facts`` in JSON.
    """

    state: State
    text: str
    fix: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def ok(text: str, *, details: tuple[str, ...] = (), **facts: Any) -> Outcome:
    return Outcome(State.OK, text, (), details, facts)


def note(text: str, *fix: str, details: tuple[str, ...] = (), **facts: Any) -> Outcome:
    return Outcome(State.NOTE, text, fix, details, facts)


def warning(text: str, *fix: str, details: tuple[str, ...] = (), **facts: Any) -> Outcome:
    return Outcome(State.WARNING, text, fix, details, facts)


def failure(text: str, *fix: str, details: tuple[str, ...] = (), **facts: Any) -> Outcome:
    return Outcome(State.FAILURE, text, fix, details, facts)


def na(text: str, *fix: str) -> Outcome:
    return Outcome(State.NA, text, fix)


Run = Callable[["Machine"], Outcome]


@dataclass(frozen=True)
class Check:
    """A question about a machine.

    ``group`` is the name of its module, ``limit`` seconds that it may take. A ``fast`` one starts
    no Python and reads no tree; a ``replayable`` one needs nothing but what a recording holds.
    """

    id: str
    group: str
    title: str
    run: Run
    limit: float
    fast: bool
    replayable: bool


@dataclass(frozen=True)
class Report:
    """A check and its outcome; ``seconds`` is how long it took."""

    check: Check
    outcome: Outcome
    seconds: float


REGISTER: dict[str, Check] = {}
"""Every check by its id, in the order of the modules and of their lines."""


def check(
    id: str, title: str, *, limit: float = 15.0, fast: bool = True, replayable: bool = True
) -> Callable[[Run], Run]:
    """Register a function as the check ``id``.

    Raises:
        ValueError: the id is taken.
    """

    def register(run: Run) -> Run:
        if id in REGISTER:
            raise ValueError(f"check id used twice: {id}")
        group = run.__module__.rpartition(".")[2]
        REGISTER[id] = Check(id, group, title, run, limit, fast, replayable)
        return run

    return register
