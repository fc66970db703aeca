"""The processes of a run, also when it trains in another container.

The run folder tells which process holds it, by its id in the PID namespace it runs in. Ours may be
another one: the kernel's list of locks and the ``NSpid`` line of ``/proc/PID/status`` translate,
where the monitor sees the host's processes (``pid: host``). No process is taken for the run's
unless something besides its number says so.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from verl_p40.monitor import proc as kernel

PSS_EVERY = 30.0
"""Seconds between two looks at PSS: the one costly number."""
_SCAN_SHARE = 0.004
"""Of one core: what looking for new processes may take."""
_SCAN_AT_LEAST_EVERY = 10.0
_AGE_SLACK = 5.0


@dataclass(frozen=True)
class TreeSample:
    """A run's processes. Memory in bytes; 100 % of ``cpu_percent`` is one core.

    ``rss`` counts a shared page in every process that has it (Ray's workers share many), ``pss``
    once in all. ``pss`` is None between two looks and where it may not be read; ``cpu_percent`` is
    None in the first sample.
    """

    root: int
    processes: int
    rss: int
    pss: int | None
    cpu_percent: float | None


@dataclass(frozen=True)
class Root:
    """A run's first process, by its id in our namespace and its start in ticks since boot."""

    pid: int
    started: int


def recorded_pid(lock_file: Path) -> int:
    """The id the run's supervisor gave itself, in its own PID namespace; 0 for none."""
    try:
        return int(lock_file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def locate(lock_file: Path, proc: Path = kernel.PROC) -> Root | str:
    """The process that holds a run folder, or the reason why it cannot be seen from here."""
    try:
        lock = lock_file.stat()
    except OSError as error:
        return f"{lock_file} cannot be read: {error.strerror}"
    for pid in kernel.lock_holders(lock.st_dev, lock.st_ino, proc):
        found = kernel.stat(pid, proc)
        if found is not None and found.state != "Z":
            return Root(pid, found.started)
    number = recorded_pid(lock_file)
    if number <= 0:
        return "the run does not say which process it is"
    same_number = [
        pid for pid in kernel.pids(proc) if kernel.namespaced_pids(pid, proc)[-1:] == [number]
    ]
    sure = [pid for pid in same_number if _is_run(pid, lock, proc)]
    if len(sure) == 1:
        found = kernel.stat(sure[0], proc)
        if found is not None:
            return Root(found.pid, found.started)
    if len(sure) > 1:
        return f"{len(sure)} processes could be process {number} of the run"
    if same_number:
        other = kernel.command(same_number[0], proc) or "a kernel thread"
        return (
            f"process {number} here is not the run's but {other[:60]!r}: it trains in another "
            "PID namespace (a container's monitor needs `pid: host`)"
        )
    return (
        f"process {number} of the run is in another PID namespace "
        "(a container's monitor needs `pid: host`)"
    )


def _is_run(pid: int, lock: os.stat_result, proc: Path) -> bool:
    has_lock = kernel.has_open(pid, lock.st_dev, lock.st_ino, proc)
    if has_lock is not None:
        return has_lock
    # Another user's process: what is left is its command line and that it is older than the lock.
    words = kernel.command(pid, proc)
    found = kernel.stat(pid, proc)
    if found is None or not ("verl-p40" in words or "verl_p40" in words):
        return False
    return _boot_time(proc) + found.started / kernel.TICKS < lock.st_mtime + _AGE_SLACK


def _boot_time(proc: Path) -> float:
    for line in kernel.read(f"{proc}/stat").splitlines():
        if line.startswith(b"btime "):
            return float(line.split()[1])
    return 0.0


class Tree:
    """Samples one run's processes. ``hidden`` says why, when they cannot be seen."""

    _LOOK_AGAIN = 5.0

    def __init__(self, lock_file: Path, proc: Path = kernel.PROC) -> None:
        self._lock_file, self._proc = lock_file, proc
        self._root: Root | None = None
        self._looked = self._pss_read = self._sampled = float("-inf")
        self._cpu: dict[tuple[int, int], float] | None = None
        self._scan_due = float("-inf")
        self._members: list[int] = []
        self.hidden = ""

    def sample(self, now: float) -> TreeSample | None:
        """The processes now; None when they cannot be seen.

        Args:
            now: a monotonic clock, in seconds.
        """
        family = self._family(now)
        if not family:
            self._root, self._cpu = None, None
            if now - self._looked < self._LOOK_AGAIN:
                return None
            self._looked = now
            found = locate(self._lock_file, self._proc)
            if isinstance(found, str):
                self.hidden = found
                return None
            self._root, self._scan_due = found, now
            family = self._family(now)
            if not family:
                return None
        self.hidden = ""
        root = family[0].pid
        return TreeSample(
            root=root,
            processes=len(family),
            rss=sum(one.rss for one in family),
            pss=self._pss(family, now),
            cpu_percent=self._cpu_percent(family, now),
        )

    def _family(self, now: float) -> list[kernel.Stat]:
        """The run's processes, its first one first; none when that is gone.

        Who has come is found by a look at every process of the machine; in between those that are
        known are asked. The look comes as seldom as it takes for it to cost next to nothing.
        """
        if self._root is None:
            return []
        if now >= self._scan_due:
            began = time.thread_time()
            known = kernel.stats(kernel.pids(self._proc), self._proc)
            cost = time.thread_time() - began
            self._scan_due = now + min(_SCAN_AT_LEAST_EVERY, cost / _SCAN_SHARE)
        else:
            known = kernel.stats(self._members, self._proc)
        first = known.get(self._root.pid)
        if first is None or first.started != self._root.started or first.state == "Z":
            return []
        family = kernel.below(self._root.pid, known)
        self._members = [one.pid for one in family]
        return family

    def _cpu_percent(self, family: list[kernel.Stat], now: float) -> float | None:
        cpu = {(one.pid, one.started): one.cpu_seconds for one in family}
        before, self._cpu = self._cpu, cpu
        since, self._sampled = self._sampled, now
        if before is None or now <= since:
            return None
        # One that is new may be older than the sample before: it counts as one core at most. What
        # one did that has ended since is not known.
        span = now - since
        spent = sum(
            seconds - before[key] if key in before else min(seconds, span)
            for key, seconds in cpu.items()
        )
        return max(0.0, 100 * spent / span)

    def _pss(self, family: list[kernel.Stat], now: float) -> int | None:
        if now - self._pss_read < PSS_EVERY:
            return None
        self._pss_read = now
        total = 0
        for one in family:
            size = kernel.pss(one.pid, self._proc)
            if size is None:
                if kernel.stat(one.pid, self._proc) is None:
                    continue
                return None
            total += size
        return total
