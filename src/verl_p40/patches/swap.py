"""Replace a folder by a newly written one, so that a crash leaves the old or the new one.

The new folder is written beside the old one and exchanged with it by one system call where the
kernel and the file system offer that (``renameat2`` with RENAME_EXCHANGE, Linux 3.15, see
renameat2(2)), else by two renames. A folder of a container image's lower layer can be renamed in
neither way (EXDEV, see "redirect_dir" in the kernel's overlayfs.rst): there the old one is copied
aside and removed. A crash between the steps is repaired by :func:`recover`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_p40.errors import BusyError, DiskError, MachineError, UsageError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def next_folder(folder: Path) -> Path:
    """Where the replacement of ``folder`` is written. Its name cannot be imported."""
    return folder.with_name(f".{folder.name}.p40-next")


def previous_folder(folder: Path) -> Path:
    """Where the old content stays between the two renames."""
    return folder.with_name(f".{folder.name}.p40-previous")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``folder`` when the block ends well and is removed otherwise.

    Yields:
        Where to fill it; not there yet.

    Raises:
        UsageError: ``folder`` is there and not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: not an empty folder", fix="name a folder that does not exist")
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = next_folder(folder)
    shutil.rmtree(work, ignore_errors=True)
    try:
        yield work
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Hold the lock for changing ``folder``; errors of the file system become ours.

    Yields:
        Whether a crashed call had left ``folder`` moved aside (see :func:`recover`).

    Raises:
        BusyError: another process holds it.
        DiskError: the disk or the quota is full. What was half-written is removed.
        MachineError: no permission, or the folder beside ``folder`` is missing.
    """
    try:
        lock = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _flock(lock, folder)
            yield recover(folder)
        finally:
            os.close(lock)
    except BaseException as error:
        if folder.exists():  # so whatever is still beside it is not needed
            shutil.rmtree(next_folder(folder), ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"{folder.parent}: no space left to write the new {folder.name}; "
                "the old one is untouched",
                fix="free some 50 MB there and run the command again",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
            raise MachineError(
                f"cannot change {folder}: {error.strerror} ({error.filename})",
                fix="run it as the owner of that environment, or name another folder",
            ) from error
        raise


def _flock(lock: int, folder: Path) -> None:
    # On the parent folder itself: no lock file stays behind, and a crash releases it.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"another verl-p40 process is changing {folder}",
            fix="wait until it is done, then run the command again",
        ) from None
    except OSError as error:  # a network file system without locks: the exchange is still atomic
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
            raise


def recover(folder: Path) -> bool:
    """Finish or undo what a crash left behind. Needs the lock.

    Returns:
        Whether ``folder`` had to be put back.
    """
    previous = previous_folder(folder)
    restored = False
    if previous.is_dir() and next_folder(folder).is_dir() and folder.is_dir():
        # Only a copy set aside by _replace leaves all three: the removal was not finished.
        shutil.rmtree(folder)
    if previous.is_dir() and not os.path.lexists(folder):
        previous.rename(folder)
        restored = True
    copying = previous.with_name(f"{previous.name}-copying")
    for leftover in (previous, copying, next_folder(folder)):
        if leftover.is_dir():
            shutil.rmtree(leftover)
    return restored


def copy_folder(folder: Path, to: Path) -> None:
    """Copy every file with its mode and times, links followed: ``to`` shares nothing with others.

    Unlike ``shutil.copytree`` it stops at the first error and raises that one, so that a full
    disk is known as such.
    """
    to.mkdir()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                copy_folder(Path(entry.path), to / entry.name)
            else:
                shutil.copy2(entry.path, to / entry.name)
    shutil.copystat(folder, to)


def swap_in(folder: Path) -> None:
    """Put :func:`next_folder` in the place of ``folder`` and remove the old content."""
    new = next_folder(folder)
    _sync(new)
    if not folder.exists():
        new.rename(folder)
        return
    try:
        if exchange(new, folder):
            old = new
        else:
            old = previous_folder(folder)
            folder.rename(old)
            new.rename(folder)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        old = _replace(folder, new)
    _sync_folder(folder.parent)
    shutil.rmtree(old)


def _replace(folder: Path, new: Path) -> Path:
    """Put ``new`` in the place of a folder that cannot be renamed; the copy of the old one."""
    old = previous_folder(folder)
    copying = old.with_name(f"{old.name}-copying")
    shutil.rmtree(copying, ignore_errors=True)
    try:
        copy_folder(folder, copying)
    except OSError:
        shutil.rmtree(copying, ignore_errors=True)
        raise
    _sync(copying)
    copying.rename(old)
    _sync_folder(folder.parent)
    shutil.rmtree(folder)
    new.rename(folder)
    return old


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False if this system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library older than glibc 2.28, or musl
        return False
    names = (os.fsencode(one), os.fsencode(other))
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _sync(folder: Path) -> None:
    """Write everything below ``folder`` to the disk before its name changes."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)  # noqa: PTH118
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
