"""``<runs>/.monitor.json``: that a monitor is at work, for :mod:`verl_p40.health`."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_p40.health.check import MONITOR_BEAT as NAME
from verl_p40.train.folder import write_whole


def write(runs_dir: Path, *, run: str | None, samples: int, errors: int, interval: float) -> None:
    """Say that a sample has just gone where it belongs. The file is replaced in one rename.

    Args:
        run: the run that is followed; None while there is none.
        samples: samples written into run folders since the monitor's start.
        errors: samples that could not be written.
        interval: seconds between two samples, by which a health check knows what is late.

    Raises:
        OSError: the folder cannot be written.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    document = {
        "time": now,
        "run": run,
        "samples": samples,
        "errors": errors,
        "interval": interval,
    }
    write_whole(runs_dir / NAME, json.dumps(document) + "\n")


def last(runs_dir: Path | str) -> dict[str, Any] | None:
    """What the last heartbeat says: ``time``, ``run``, ``samples``, ``errors``, ``interval``."""
    try:
        document = json.loads((Path(runs_dir) / NAME).read_text(encoding="utf-8"))
        datetime.fromisoformat(document["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(document)


def freshness(runs_dir: Path | str) -> float | None:
    """Seconds since a monitor's last good sample; None when there has been none.

    A sample is good when it was written, or when there was no run to write it for.
    """
    document = last(runs_dir)
    if document is None:
        return None
    then = datetime.fromisoformat(document["time"])
    return max(0.0, (datetime.now(timezone.utc) - then).total_seconds())
