"""A lock between processes that the system drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_p40.errors import MachineError


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold ``path`` (created when missing) until the block ends, waiting for another holder.

    ``on_wait`` is called once when there is one to wait for.

    Raises:
        MachineError: the file cannot be created.
    """
    while True:
        try:
            handle = path.open("a")
        except OSError as error:
            raise MachineError(
                f"cannot write {path}: {error.strerror}",
                fix="check the folder's permissions, or set VERL_P40_HOME to another one",
            ) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_current(path, handle.fileno()):
                continue  # the holder before us removed the file: hold the one others will see
            yield
            return
        finally:
            handle.close()


def _is_current(path: Path, descriptor: int) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
