"""The errors a user can cause or meet, and the exit code of each.

Every room raises these; only ``verl_p40.cli`` turns them into output. The table in
``docs/exit-codes.md`` is written from :class:`ExitCode` (a test compares them).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes of ``verl-p40``, stable across releases."""

    OK = 0
    FOUND = 1
    """A check ran to its end and found a problem (audit, verify, lock drift)."""
    USAGE = 2
    """Bad arguments: unknown preset, override, option or file name."""
    ENVIRONMENT = 3
    """This machine or interpreter cannot do it: wrong Python, missing tool, no permission."""
    NETWORK = 4
    """A download failed or gave a file whose hash is not the pinned one."""
    DATA = 5
    """A data set, model or checkpoint is missing, malformed or does not fit the config."""
    TREE = 6
    """An installed verl/vLLM tree is not the pinned release, or a patch does not apply."""
    DISK = 7
    """Not enough disk space."""
    BUSY = 8
    """Another process holds the run folder or the environment."""
    TRAINING = 9
    """The training process failed."""
    TRIPWIRE = 10
    """The precision tripwire met a half-precision tensor."""
    WARNING = 11
    """A check ran to its end and found nothing worse than something that works for now."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C or SIGTERM."""


class VerlP40Error(Exception):
    """One clear line: what is wrong and where, plus what to do about it.

    Args:
        message: what is wrong and where, one sentence, no trailing full stop needed.
        fix: what to do: a command or a setting to paste. Empty when there is nothing to say.
    """

    exit_code: ExitCode = ExitCode.FOUND

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class UsageError(VerlP40Error):
    exit_code = ExitCode.USAGE


class MachineError(VerlP40Error):
    exit_code = ExitCode.ENVIRONMENT


class NetworkError(VerlP40Error):
    exit_code = ExitCode.NETWORK


class DataError(VerlP40Error):
    exit_code = ExitCode.DATA


class TreeError(VerlP40Error):
    exit_code = ExitCode.TREE


class DiskError(VerlP40Error):
    exit_code = ExitCode.DISK


class BusyError(VerlP40Error):
    exit_code = ExitCode.BUSY


class TrainingError(VerlP40Error):
    exit_code = ExitCode.TRAINING


class TripwireError(VerlP40Error):
    exit_code = ExitCode.TRIPWIRE
