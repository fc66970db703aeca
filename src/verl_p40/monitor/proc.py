"""What the kernel says of processes, read from ``/proc`` in one pass.

psutil gives the same, at several times the cost: a monitor that samples every second should not
be seen in its own samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stat:
    """One process. ``started`` is in clock ticks since boot: with the pid it names a process."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    started: int
    rss: int


def read(path: str) -> bytes:
    """A file of /proc, whole. Cheaper than an open() of a file that buffers and decodes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def stat(pid: int, proc: Path = PROC) -> Stat | None:
    """One process; None when there is none."""
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # One line of a few hundred bytes: one read has it all.
            raw = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return None
    # "pid (name) state parent ...": the name may hold spaces and parentheses.
    fields = raw[raw.rindex(b")") + 2 :].split(None, 22)
    return Stat(
        pid=pid,
        parent=int(fields[1]),
        state=fields[0].decode(),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / TICKS,
        started=int(fields[19]),
        rss=int(fields[21]) * _PAGE,
    )


def pids(proc: Path = PROC) -> Iterator[int]:
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def stats(wanted: Iterable[int], proc: Path = PROC) -> dict[int, Stat]:
    """Those of the processes that there are."""
    found = {}
    for pid in wanted:
        one = stat(pid, proc)
        if one is not None:
            found[pid] = one
    return found


def below(root: int, known: Mapping[int, Stat]) -> list[Stat]:
    """``root`` and all its descendants that are not zombies."""
    children: dict[int, list[Stat]] = {}
    for one in known.values():
        children.setdefault(one.parent, []).append(one)
    out, queue = [], [known[root]] if root in known else []
    while queue:
        one = queue.pop()
        queue += children.get(one.pid, [])
        if one.state != "Z":
            out.append(one)
    return out


def pss(pid: int, proc: Path = PROC) -> int | None:
    """Proportional set size in bytes: shared pages divided among those that share them.

    The kernel walks the page tables for it: some milliseconds for a process of gigabytes. None
    where it may not be read.
    """
    try:
        raw = read(f"{proc}/{pid}/smaps_rollup")
    except OSError:
        return None
    for line in raw.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    # A kernel thread, or a process that is on its way out, has no memory of its own.
    return 0


def namespaced_pids(pid: int, proc: Path = PROC) -> list[int]:
    """The ids of a process in its PID namespaces, from ours to its own."""
    try:
        raw = read(f"{proc}/{pid}/status")
    except OSError:
        return []
    for line in raw.splitlines():
        if line.startswith(b"NSpid:"):
            return [int(word) for word in line.split()[1:]]
    return []


def command(pid: int, proc: Path = PROC) -> str:
    """Its command line; empty where there is none to read."""
    try:
        return read(f"{proc}/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def has_open(pid: int, device: int, inode: int, proc: Path = PROC) -> bool | None:
    """Whether a process has a file open; None where its files may not be looked at."""
    try:
        with os.scandir(f"{proc}/{pid}/fd") as entries:
            for entry in entries:
                try:
                    # Through the link, which leads to the file even into other mount namespaces.
                    found = entry.stat()
                except OSError:
                    continue
                if (found.st_dev, found.st_ino) == (device, inode):
                    return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def lock_holders(device: int, inode: int, proc: Path = PROC) -> list[int]:
    """Processes of our PID namespace (and those below it) that hold a ``flock`` on a file.

    The kernel leaves out of ``/proc/locks`` what other namespaces hold. Needs no permission.
    """
    try:
        lines = read(f"{proc}/locks").decode().splitlines()
    except OSError:
        return []
    holders = []
    for line in lines:
        fields = line.split()
        # "7: FLOCK ADVISORY WRITE 4242 fe:01:5832771 0 EOF"; "->" marks one that waits.
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "WRITE":
            continue
        major, minor, number = fields[5].split(":")
        if (int(major, 16), int(minor, 16)) == (os.major(device), os.minor(device)) and int(
            number
        ) == inode:
            holders.append(int(fields[4]))
    return holders
