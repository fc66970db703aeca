"""How an attempt ended, as the run's last event."""

from __future__ import annotations

from typing import Any

from verl_p40.train.folder import RunFolder
from verl_p40.train.supervise import Outcome


def note_end(run: RunFolder, outcome: Outcome) -> None:
    """Add ``end``, ``stopped`` (with signal and checkpoint) or ``failure`` to the run's events."""
    details: dict[str, Any] = {"status": outcome.status, "seconds": round(outcome.seconds, 3)}
    if outcome.status == "finished":
        run.add_event("end", step=outcome.step, total=outcome.total, **details)
        return
    details["exit"] = outcome.exit_text
    details["phase"] = outcome.phase
    if outcome.status == "interrupted":
        details |= {"signal": outcome.signal, "checkpoint": outcome.checkpoint}
        run.add_event("stopped", step=outcome.step, **details)
        return
    if outcome.failure:
        details["error"] = outcome.failure.headline
        details["cause"] = outcome.failure.kind or None
    if outcome.trip:
        details["error"] = outcome.trip.line()
    run.add_event("failure", step=outcome.step, **details)
