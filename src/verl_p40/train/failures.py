"""What to tell of a failed trainer: the error that came first, not the one that followed."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_p40.diagnose import Diagnosis

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^\([\w.:<>-]+ pid=\d+(?:, ip=[\d.]+)?\)\s?")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_CALL = re.compile(r"ray::\w*Worker\w*\.(\w+)\(\)")
_METRICS = re.compile(r"step:\d+ - ")
"""verl's console logger: a kilobyte of numbers a step, which metrics.jsonl has too."""
_WIDTH = 400
_GONE = ("sigkill-suspected", "abort")
"""Symptoms of a process that died without saying why."""
_AN_ERROR = 4
"""Suspicion from which a line names an error, rather than mentions one."""

DISK_FULL = "no room left: the disk of the run folder is full"
"""What the supervisor says, and a rule of `verl-p40 diagnose` knows."""


@dataclass(frozen=True)
class Failure:
    """``headline`` is one line of the log, ``lines`` the last ones before it without Ray's
    prefixes, and after it what `verl-p40 diagnose` knows of it, if anything."""

    headline: str
    lines: tuple[str, ...]
    known: tuple[str, ...] = ()
    """Of ``lines``, those that say what `verl-p40 diagnose` knows."""
    kind: str = ""
    """Of the root cause, as diagnose's rules name it, or else of what shows that a process is gone;
    empty where neither was found."""
    model: str = ""
    """Which of PPO's models was at work when the card's memory ran out."""
    call: str = ""
    """The worker's method that raised, as Ray names it (``critic_update_critic``)."""


def clean(line: str) -> str:
    """A log line without colours and without Ray's ``(Worker pid=1)`` in front."""
    line = _ANSI.sub("", line.rsplit("\r", 1)[-1]).rstrip()
    return _REPEATED.sub("", _RAY_PREFIX.sub("", line))


def explain(log: str, *, full: bool = False, around: int = 12) -> Failure:
    """Find the error in a log, as `verl-p40 diagnose` does.

    Args:
        full: that the disk of the log had no room left when the trainer ended. What it last said
            is then missing, so that counts unless the log itself names a cause.

    The line that shows the root cause counts; then the line that most looks like an error; then
    a report of a dead process; else the log names none, and its last lines follow. Metrics and
    overlong lines are left out or cut.
    """
    # Here, for the rules take a third of a second to load, and a run that goes well needs none.
    from verl_p40.diagnose import diagnose_chunks

    if full:
        log = f"{log}\n{DISK_FULL}\n"
    lines = [clean(line)[:_WIDTH] for line in log.split("\n")]
    diagnosis = diagnose_chunks([log.encode("utf-8", "replace")])
    number = _error(diagnosis)
    shown = lines[:number] if number else lines
    last = [line for line in shown if line and not _METRICS.match(line)][-around:]
    headline = lines[number - 1] if number else "the log names no error"
    cause = diagnosis.causes[0] if diagnosis.causes else None
    known, kind = tuple(_known(diagnosis)), _kind(diagnosis)
    return Failure(
        headline,
        (*last, *known),
        known,
        kind=kind,
        model=cause.details.get("model", "") if cause else "",
        call=next(iter(reversed(_CALL.findall(log))), ""),
    )


def _kind(diagnosis: Diagnosis) -> str:
    if diagnosis.causes:
        return diagnosis.causes[0].kind
    return next((s.kind for s in diagnosis.symptoms if s.kind in _GONE), "")


def _error(diagnosis: Diagnosis) -> int:
    """The number of the line that names the error, 0 where none does."""
    from verl_p40.diagnose.judge import suspicion

    if diagnosis.causes:
        return diagnosis.causes[0].said.number
    telling = [
        line
        for line in diagnosis.suspicious
        if line.number > diagnosis.progress and suspicion(line.text) >= _AN_ERROR
    ]
    if telling:
        return max(telling, key=lambda line: suspicion(line.text)).number
    return diagnosis.symptoms[0].said.number if diagnosis.symptoms else 0


def _known(diagnosis: Diagnosis) -> Sequence[str]:
    if not diagnosis.causes:
        return ()
    cause = diagnosis.causes[0]
    return (
        f"cause ({cause.confidence} confidence): {cause.text}",
        *(f"try: {f}" for f in cause.fix),
    )


def describe_exit(code: int) -> str:
    """An exit code as people say it; negative codes are signals, as subprocess gives them."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
