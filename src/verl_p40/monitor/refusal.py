"""A folder that this user may not use, told with whose it is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from verl_p40.errors import MachineError

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
"""What no waiting helps against."""


def refusal(verb: str, path: Path, error: OSError) -> MachineError:
    """The error for a folder that cannot be read or written (``verb``)."""
    look = ", or only look with --no-write" if verb == "write" else ""
    if error.errno == errno.EROFS:
        return MachineError(
            f"cannot {verb} {path}: it is on a read-only file system",
            fix=f"mount it writable{look}",
        )
    me = os.geteuid()
    try:
        found = path.stat()
    except OSError:
        return MachineError(
            f"cannot {verb} {path}: the monitor runs as uid {me}, which may not even look at it",
            fix=f"run the monitor as its owner (docker: `user:`){look}",
        )
    mode = stat.S_IMODE(found.st_mode)
    return MachineError(
        f"cannot {verb} {path}: it belongs to uid {found.st_uid} (mode {mode:o}) "
        f"and the monitor runs as uid {me}",
        fix=f"run the monitor as uid {found.st_uid} (docker: `user:`), chown the folder{look}",
    )
