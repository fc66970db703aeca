"""The run folder: where everything of one run is, who holds it, and what has happened in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_p40.errors import BusyError, DataError, MachineError


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class RunFolder:
    """``runs/<id>/``. Every tool reads and writes this folder; there is no other state."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tripwire(self) -> Path:
        return self.path / "tripwire.json"

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    def started(self) -> bool:
        """True once a run has written its config here."""
        return self.config.is_file()

    def read_config(self) -> dict[str, Any]:
        """The resolved config of the run in this folder.

        Raises:
            DataError: the file is damaged.
        """
        # Here, for hydra takes a second, and most readers of a run folder need no config.
        from verl_p40.train.compose import from_yaml

        try:
            return from_yaml(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.config} cannot be read: {error}", fix="start another run with --new"
            ) from error

    def read_env(self) -> dict[str, Any]:
        """``env.json``, or an empty mapping where there is none."""
        try:
            loaded = json.loads(self.env.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def add_event(self, kind: str, *, step: int, **details: Any) -> None:
        """Append one event: ISO time, kind, step, and what belongs to it."""
        event = {"time": _now(), "event": kind, "step": step, **details}
        line = json.dumps(event, default=str) + "\n"
        # One write a line: a reader meets whole lines, a kill leaves at most one damaged one.
        with self.events.open("ab", buffering=0) as file:
            if file.tell() and not _ends_with_newline(self.events):
                line = "\n" + line
            file.write(line.encode())

    def read_events(self) -> list[dict[str, Any]]:
        """All whole events, oldest first."""
        try:
            lines = self.events.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        events = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                events.append(event)
        return events

    def finished_at(self) -> int | None:
        """The step at which the last attempt ended as planned; None when it did not."""
        for event in reversed(self.read_events()):
            if event["event"] == "end":
                return int(event["step"])
            if event["event"] in ("start", "resume", "failure", "stopped"):
                return None
        return None

    def holder(self) -> int | None:
        """The process that holds this folder now, 0 when it is unknown, None when nobody does."""
        try:
            fd = os.open(self.lock_file, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return self._written_pid()
        finally:
            os.close(fd)
        return None

    def check_free(self) -> None:
        """Refuse early, before anything heavy, a folder that another run holds.

        Raises:
            BusyError: naming the process.
        """
        pid = self.holder()
        if pid is not None:
            raise self._busy(pid)

    @contextmanager
    def hold(self, *, patience: float = 5.0) -> Iterator[int]:
        """Hold the folder; yields the lock's file descriptor, for the trainer to hold it too.

        The lock goes with its last holder, so a trainer that outlives a killed supervisor by
        a moment still holds it: that moment is waited for, ``patience`` seconds at most.

        Raises:
            BusyError: another process holds it.
            MachineError: the folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise MachineError(
                f"cannot write the run folder {self.path}: {error.strerror}",
                fix="choose another with --runs-dir",
            ) from error
        try:
            began = time.monotonic()
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        raise
                    pid = self._written_pid()
                    # A glance at the lock takes it for an instant, and the number of a process of
                    # another container may be ours: nobody is refused at the first look.
                    refuse = min(patience, 0.5) if _alive(pid) else patience
                    if time.monotonic() - began > refuse:
                        raise self._busy(pid) from error
                    time.sleep(0.1)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
            yield fd
        finally:
            os.close(fd)

    def _written_pid(self) -> int:
        try:
            return int(self.lock_file.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def _elsewhere(self) -> str:
        """The host (in a container: its id) that the holder wrote, where it is not this one."""
        try:
            words = self.lock_file.read_text().split()
        except OSError:
            return ""
        return words[1] if len(words) > 1 and words[1] != socket.gethostname() else ""

    def _busy(self, pid: int) -> BusyError:
        host = self._elsewhere()
        if host:
            return BusyError(
                f"{self.path} is in use by process {pid} of host or container {host}",
                fix="wait for it, stop it there, or start another run with --new",
            )
        return BusyError(
            f"{self.path} is in use by process {pid or '(unknown)'}",
            fix="wait for it, stop it (kill " + f"{pid or 'PID'}), or start another run with --new",
        )


def next_free(base: RunFolder) -> RunFolder:
    """The first of ``<id>``, ``<id>-2``, ``<id>-3``... that no run has used."""
    folder, number = base, 1
    while folder.path.exists():
        number += 1
        folder = RunFolder(base.path.with_name(f"{base.name}-{number}"))
    return folder


def file_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, default=str) + "\n"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
