"""Finds the checks, and runs them beside one another, each within its own time."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_p40.doctor import checks
from verl_p40.doctor.machine import Live, Machine
from verl_p40.doctor.model import REGISTER, Check, Outcome, Report, State, warning
from verl_p40.errors import UsageError, VerlP40Error

ORDER = (
    "nvidia",
    "gpu",
    "links",
    "container",
    "host",
    "network",
    "stack",
    "settings",
    "models",
    "presets",
)
"""Groups in the order they are shown in; modules that are not named come last."""

FAST_LIMIT = 10.0
"""Seconds that :func:`fast` waits for any of its checks."""


def discover() -> list[Check]:
    """Every check of every module in ``verl_p40.doctor.checks``."""
    found = [module.name for module in pkgutil.iter_modules(checks.__path__)]
    for name in found:
        importlib.import_module(f"{checks.__name__}.{name}")
    place = {name: i for i, name in enumerate(ORDER)}
    return sorted(REGISTER.values(), key=lambda check: place.get(check.group, len(ORDER)))


def select(words: Sequence[str] = (), machine: Machine | None = None) -> list[Check]:
    """The checks that ``words`` name: ids or groups; all of them without words.

    Raises:
        UsageError: no check or group has that name.
    """
    every = discover()
    known = {check.id for check in every} | {check.group for check in every}
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.4)
            raise UsageError(
                f"no check or group is called {word!r}"
                + (f"; nearest: {', '.join(near)}" if near else ""),
                fix="verl-p40 doctor --list",
            )
    chosen = [c for c in every if not words or c.id in words or c.group in words]
    if machine is not None and not machine.live:
        chosen = [check for check in chosen if check.replayable]
    return chosen


@dataclass
class _Running:
    check: Check
    started: float
    done: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome | None = None
    seconds: float = 0.0


def run_checks(chosen: Sequence[Check], machine: Machine) -> Iterator[Report]:
    """Run checks at the same time; yields them in their order, each as soon as it can be shown.

    A check that raises, or takes longer than its limit, is a warning of its own: the others go on.
    A thread that hangs is left behind (Python ends without waiting for it).
    """
    running = [_start(check, machine) for check in chosen]
    for each in running:
        left = each.started + each.check.limit - time.monotonic()
        if each.done.wait(max(left, 0.0)):
            assert each.outcome is not None
            yield Report(each.check, each.outcome, each.seconds)
        else:
            yield Report(
                each.check,
                warning(
                    f"no answer in {each.check.limit:.0f} s, left alone",
                    f"verl-p40 doctor --only {each.check.id} -v",
                ),
                each.check.limit,
            )


def _start(check: Check, machine: Machine) -> _Running:
    running = _Running(check, time.monotonic())

    def work() -> None:
        try:
            running.outcome = check.run(machine)
        except VerlP40Error as error:
            running.outcome = warning(error.message, *([error.fix] if error.fix else []))
        except subprocess.TimeoutExpired as error:
            program = error.cmd if isinstance(error.cmd, str) else Path(str(error.cmd[0])).name
            running.outcome = warning(f"{program} gave no answer in {error.timeout:.0f} s")
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {error}"
            running.outcome = warning(
                " ".join(text.split())[:300],
                "report it, with: verl-p40 doctor --record host.yaml",
                crashed=True,
            )
        running.seconds = time.monotonic() - running.started
        running.done.set()

    threading.Thread(target=work, name=f"doctor-{check.id}", daemon=True).start()
    return running


PREFLIGHT = ("nvidia", "gpu", "links", "host")
"""The groups whose failures no run survives, wherever it runs."""


def fast(
    words: Sequence[str] = PREFLIGHT, *, machine: Machine | None = None, limit: float = FAST_LIMIT
) -> list[Report]:
    """The failures that can be known in seconds, for a preflight.

    Runs the checks marked fast among those that ``words`` name (ids or groups), starts no Python,
    asks no network, and gives up on a check after ``limit`` seconds.
    """
    machine = machine or Live()
    chosen = [
        Check(c.id, c.group, c.title, c.run, min(c.limit, limit), c.fast, c.replayable)
        for c in select(words, machine)
        if c.fast
    ]
    return [r for r in run_checks(chosen, machine) if r.outcome.state is State.FAILURE]
