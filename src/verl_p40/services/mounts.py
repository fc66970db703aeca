"""The folders that are mounted into a container: tried by writing, and explained by their owner."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_p40.errors import DiskError, MachineError, UsageError, VerlP40Error

PROBE = 1 << 20
"""Bytes written to find out whether there is room: logs and events of a run need as much at once."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Mount:
    """A folder, by the variable that names it inside the container."""

    variable: str
    holds: str
    """What it is for, as in "the folder of ..."."""
    setting: str = ""
    """The variable in ``.env`` that says what is mounted there; empty for none."""

    def path(self) -> Path:
        """Where it is.

        Raises:
            UsageError: the variable is unset, empty or no absolute path.
        """
        value = os.environ.get(self.variable, "").strip()
        if not value:
            raise UsageError(
                f"{self.variable} is not set: it names the folder of {self.holds}",
                fix=f"{self.variable}=/folder (the image sets it; an empty value in an "
                "environment or env_file unsets it)",
            )
        if not Path(value).is_absolute():
            raise UsageError(
                f"{self.variable} is {value!r}, and must be an absolute path",
                fix=f"{self.variable}=/folder",
            )
        return Path(value)


@dataclass(frozen=True)
class Refusal:
    """Why a folder cannot be written: ``number`` is the error number, ``at`` the folder tried."""

    number: int
    at: Path

    @property
    def read_only(self) -> bool:
        """Mounted read-only, on purpose."""
        return self.number == errno.EROFS


def refusal(folder: Path) -> Refusal | None:
    """Write into a folder (made when missing); None when that went well, and left nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Refusal(_number(error), _nearest(folder))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".vp40-probe-") as probe:
            probe.write(b"\0" * PROBE)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Refusal(_number(error), folder)
    return None


def require_writable(mount: Mount) -> None:
    """Try a folder that has to be written.

    Raises:
        UsageError: its variable names none.
        MachineError: whose it is, who we are, and what to set.
        DiskError: it is full.
    """
    folder = mount.path()
    found = refusal(folder)
    if found is not None:
        raise explain(mount, found)


def explain(mount: Mount, found: Refusal) -> VerlP40Error:
    """The error of a folder that cannot be written."""
    what, at = f"the folder of {mount.holds}", found.at
    if found.number in _FULL:
        free = os.statvfs(at).f_bavail * os.statvfs(at).f_frsize
        return DiskError(
            f"the disk of {at}, {what}, is full ({free / 1e6:.0f} MB free)",
            fix="free some space there" + _elsewhere(mount),
        )
    if found.read_only:
        return MachineError(
            f"{at}, {what}, is mounted read-only",
            fix=f"mount it writable{_elsewhere(mount)}",
        )
    if not at.is_dir():
        return MachineError(f"{at}, {what}, is not a folder", fix=f"{mount.variable}=/folder")
    return MachineError(
        f"cannot write {at}, {what}: it belongs to {owner(at)}, and this service runs as "
        f"{os.geteuid()}:{os.getegid()} ({os.strerror(found.number)})",
        fix=_remedy(mount, at),
    )


def owner(path: Path) -> str:
    """``uid:gid, mode 755``."""
    state = path.stat()
    return f"{state.st_uid}:{state.st_gid}, mode {stat.S_IMODE(state.st_mode):o}"


def _remedy(mount: Mount, at: Path) -> str:
    state = at.stat()
    host = source(at)
    place = f"what is mounted at {at}" if host is None else str(host)
    chown = f"on the host: sudo chown -R {os.geteuid()} {place}"
    if state.st_uid == 0 or not state.st_mode & stat.S_IWUSR:
        # Docker makes a missing folder of the host as root, and nobody should train as root.
        return chown
    settings = [f"VERL_P40_UID={state.st_uid}"]
    if state.st_mode & stat.S_IWGRP:
        settings.append(f"VERL_P40_GID={state.st_gid}")
    return f"{' or '.join(settings)} in .env; or {chown}"


def _elsewhere(mount: Mount) -> str:
    return f", or name another folder: {mount.setting}=/folder in .env" if mount.setting else ""


def source(folder: Path) -> Path | None:
    """Where a mounted folder is on its file system, from ``/proc/self/mountinfo`` (see proc(5)).

    On the host that is its path, if the file system is the root's; None for what is no mount.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        fields = line.split(" ")
        if len(fields) > 4 and _unescaped(fields[4]) == str(folder) and fields[3] != "/":
            return Path(_unescaped(fields[3]))
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _number(error: OSError) -> int:
    return error.errno or errno.EIO


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next(place for place in [folder, *folder.parents] if place.exists())
