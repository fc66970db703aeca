"""How doctor's reports are shown: to people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from verl_p40.doctor.model import Report, State, worst

_MARKS = {
    State.OK: ("ok", "green"),
    State.NOTE: ("note", "cyan"),
    State.WARNING: ("warning", "yellow"),
    State.FAILURE: ("FAILURE", "bold red"),
    State.NA: ("n/a", "dim"),
}
_WIDTH = max(len(word) for word, _ in _MARKS.values())


def show(out: Console, report: Report, verbose: bool, *, live: bool = True) -> None:
    """One line, and beneath it what to do; with ``verbose`` the details and the time.

    Of a recording (not ``live``), what it has no answer to is left out unless ``verbose``.
    """
    if report.outcome.state is State.NA and not live and not verbose:
        return
    word, style = _MARKS[report.outcome.state]
    outcome = report.outcome
    line = f"[{style}]{word:<{_WIDTH}}[/] [bold]{report.check.id}[/] {escape(outcome.text)}"
    if outcome.state is State.NA and outcome.fix:
        line += f" [green]>[/] {escape(outcome.fix[0])}"
    out.print(line, soft_wrap=True)
    indent = " " * (_WIDTH + 1)
    if outcome.state not in {State.OK, State.NA}:
        for line in outcome.fix:
            out.print(f"{indent}[green]>[/] {escape(line)}", soft_wrap=True)
    if verbose:
        for line in outcome.details:
            out.print(f"{indent}[dim]{escape(line)}[/]", soft_wrap=True)
        out.print(f"{indent}[dim]{escape(report.check.title)}, {report.seconds:.1f} s[/]")


def summary(out: Console, reports: Sequence[Report]) -> None:
    states = [report.outcome.state for report in reports]
    counts = [f"{states.count(state)} {state.value}" for state in State if states.count(state)]
    word, style = _MARKS[worst(states)]
    out.print(f"\n[{style}]{word}[/]: {', '.join(counts)}")


def to_json(reports: Sequence[Report]) -> dict[str, Any]:
    """The document of ``--json``; ``schema`` changes when a key does."""
    states = [report.outcome.state for report in reports]
    return {
        "schema": 1,
        "state": worst(states).value,
        "counts": {state.value: states.count(state) for state in State},
        "checks": [
            {
                "id": report.check.id,
                "group": report.check.group,
                "title": report.check.title,
                "state": report.outcome.state.value,
                "text": report.outcome.text,
                "fix": list(report.outcome.fix),
                "details": list(report.outcome.details),
                "facts": report.outcome.facts,
                "seconds": round(report.seconds, 3),
            }
            for report in reports
        ],
    }
