"""The two checks, over the heartbeats that supervisor and monitor write into the runs folder."""

# No pathlib: it is a tenth of the time that a check takes.
# ruff: noqa: PTH115, PTH118, PTH123
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone

MONITOR_BEAT = ".monitor.json"
RUN_BEAT = "heartbeat.json"
PREPARING = ".preparing.json"
PID_NAMESPACE = "/proc/self/ns/pid"
"""A link that names the namespace, in which a process number means something."""

LIMITS = {
    # Named in docs/services.md.
    "VERL_P40_HEALTH_STEP": 300.0,
    "VERL_P40_HEALTH_START": 1800.0,
    "VERL_P40_HEALTH_SUPERVISOR": 60.0,
    "VERL_P40_HEALTH_MONITOR": 15.0,
}
"""Seconds, by variable: the least that a step may take; that start and preparation may take
without getting on; that a supervisor may be silent for; the least for a monitor's sample."""

MEDIANS, SLOWEST = 10.0, 3.0
"""A step may take so many times the median of the last twenty, and so many times the longest of
them (one with a validation of the whole test set and a checkpoint)."""

INTERVALS = 5.0
"""A sample may be so many of the monitor's intervals old."""

Beat = dict[str, object]


class LimitError(ValueError):
    """A variable that holds no number of seconds."""


class Health:
    """The verdict: ``ok``, and why."""

    def __init__(self, ok: bool, why: str, **facts: object) -> None:
        self.ok, self.why, self.facts = ok, why, facts

    def line(self) -> str:
        """What `docker inspect` shows."""
        return f"{'healthy' if self.ok else 'unhealthy'}: {self.why}"


def limit(name: str) -> float:
    """A limit in seconds: the variable's, or the default.

    Raises:
        LimitError: the variable holds something else.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return LIMITS[name]
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise LimitError(f"{name} is {text!r}, and must be a number of seconds above 0")
    return seconds


def train(runs_dir: str) -> Health:
    """Whether the run that was begun last on this host (in this container) gets on.

    Without one of this host, the one of any host: that is how the host looks at a container's.
    """
    beats = list(_beats(runs_dir))
    own = [beat for beat in beats if beat.get("host") == os.uname().nodename]
    if not beats:
        return Health(False, f"no training has been started in {runs_dir}")
    # One that is at work before one that has ended: a clock set back makes the older the newer.
    beat = max(own or beats, key=lambda beat: (_is_at_work(beat), str(beat["time"])))
    state = beat.get("state")
    if state == "preparing":
        return _preparing(beat)
    if state == "training":
        return _training(runs_dir, beat)
    name, step, total = beat.get("run"), beat.get("step"), beat.get("total")
    if state == "finished":
        return Health(True, f"{name} is finished, at step {step} of {total}")
    return Health(False, f"{name} was {state} at step {step} of {total}: nothing trains")


def _beats(runs_dir: str) -> Iterator[Beat]:
    try:
        with os.scandir(runs_dir) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return
    for name in names:
        hidden = name.startswith(".")
        if hidden and not name.endswith(PREPARING):
            continue
        beat = _read(os.path.join(runs_dir, name, *([] if hidden else [RUN_BEAT])))
        if beat is not None:
            yield beat


def _read(path: str) -> Beat | None:
    """A heartbeat with the time it was written; None for what is none."""
    try:
        with open(path, encoding="utf-8") as file:
            beat = json.load(file)
        _age(beat, "time")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(beat)


def _age(beat: Beat, key: str) -> float:
    """Seconds since a time in the beat; 0 for one to come (a clock that was set back)."""
    then = datetime.fromisoformat(str(beat[key]))
    return max(0.0, (datetime.now(timezone.utc) - then).total_seconds())


def _number(beat: Beat, key: str) -> float:
    value = beat.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _preparing(beat: Beat) -> Health:
    allowed, since = limit("VERL_P40_HEALTH_START"), _age(beat, "progress")
    what = f"{beat.get('run')}: {beat.get('phase')}"
    if _is_gone(beat):
        return Health(False, f"{what}, and its process, {beat.get('pid')}, is gone")
    return _judge(since, allowed, what)


def _training(runs_dir: str, beat: Beat) -> Health:
    silent, allowed = _age(beat, "time"), limit("VERL_P40_HEALTH_SUPERVISOR")
    name = beat.get("run")
    if _is_gone(beat) or silent > allowed:
        how = "is stopped or hangs" if _is_held(runs_dir, str(name)) else "is gone"
        return Health(
            False,
            f"{name}: its supervisor, process {beat.get('pid')}, {how}: nothing heard of it for "
            f"{clock(silent)} at step {beat.get('step')} of {beat.get('total')}",
        )
    step, total = beat.get("step"), beat.get("total")
    what = f"{name}: {beat.get('phase')}, step {step} of {total}"
    allowed = step_limit(
        _number(beat, "median_step_seconds"), _number(beat, "slowest_step_seconds")
    )
    return _judge(_age(beat, "progress"), allowed, what)


def step_limit(median: float, slowest: float) -> float:
    """Seconds that training may take without getting on, by the last steps' (0: none yet).

    Raises:
        LimitError: a variable holds no number of seconds.
    """
    if not median:
        # The first step compiles, warms up and allocates: nothing to compare it with.
        return limit("VERL_P40_HEALTH_START")
    return max(limit("VERL_P40_HEALTH_STEP"), MEDIANS * median, SLOWEST * slowest)


def _judge(since: float, allowed: float, what: str) -> Health:
    facts = {"since": round(since, 3), "limit": round(allowed, 3)}
    if since > allowed:
        return Health(
            False, f"{what}; has not got on for {clock(since)} (limit {clock(allowed)})", **facts
        )
    return Health(True, f"{what}; got on {clock(since)} ago (limit {clock(allowed)})", **facts)


def _is_gone(beat: Beat) -> bool:
    """Whether the writer is known to be dead: only its own host or container can tell."""
    pid = beat.get("pid")
    if not isinstance(pid, int) or beat.get("pid_namespace") != pid_namespace():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _is_at_work(beat: Beat) -> bool:
    """Whether the writer is known to live: of another container only its times can tell."""
    ours = beat.get("pid_namespace") == pid_namespace()
    return beat.get("state") in ("preparing", "training") and ours and not _is_gone(beat)


def pid_namespace() -> str | None:
    """What tells this container's process numbers from another's; None where there is no such."""
    try:
        return os.readlink(PID_NAMESPACE)
    except OSError:
        return None


def _is_held(runs_dir: str, name: str) -> bool:
    """Whether somebody holds the run's lock. Asked only of a run that is silent already: the
    question takes a free lock for an instant."""
    import fcntl

    try:
        lock = os.open(os.path.join(runs_dir, name, ".lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def monitor(runs_dir: str) -> Health:
    """Whether the monitor's last good sample is fresh."""
    beat = _read(os.path.join(runs_dir, MONITOR_BEAT))
    if beat is None:
        return Health(False, f"no monitor has taken a sample in {runs_dir}")
    interval = _number(beat, "interval") or 1.0
    allowed = max(limit("VERL_P40_HEALTH_MONITOR"), INTERVALS * interval)
    since = _age(beat, "time")
    run = beat.get("run")
    what = f"following {run}" if run else "no run to follow"
    facts = {"since": round(since, 3), "limit": round(allowed, 3)}
    if since > allowed:
        why = f"the last good sample is {clock(since)} old (limit {clock(allowed)}); {what}"
        return Health(False, why, **facts)
    return Health(True, f"sampled {clock(since)} ago; {what}", **facts)


def clock(seconds: float) -> str:
    """``12 s``, ``2:05`` or ``1:02:05``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


CHECKS = {"train": train, "monitor": monitor}
