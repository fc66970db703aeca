"""From what a user names (file, wheel, folder, installed package) to the files to look into."""

from __future__ import annotations

import mmap
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import IO

from packaging.utils import canonicalize_name

from verl_p40.errors import DataError, MachineError, UsageError
from verl_p40.kernels.binary import recognised
from verl_p40.kernels.view import Damaged, View
from verl_p40.stack.env import StackEnv

ZIPS = (".whl", ".zip", ".conda", ".egg")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_HEAD = 512
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """A file to look into; ``open`` maps it, or unpacks it where it is inside of an archive.

    ``open`` raises Damaged where it cannot be read.
    """

    name: str
    size: int
    open: Callable[[], AbstractContextManager[View]]


def find(target: str, env: StackEnv | None) -> Iterator[Source]:
    """The files named by ``target`` that can hold GPU code.

    Args:
        target: a file, a wheel, a folder, or a package installed in ``env``, by the name it is
            imported or was installed by.
        env: the training environment, if there is one.

    Raises:
        UsageError: no such file or package, or no file that can hold GPU code.
        DataError: an archive is damaged.
        MachineError: it looks like a package's name, and there is no environment to look in.
    """
    path = Path(target).expanduser()
    if path.is_dir():
        yield from _folder(path)
    elif path.is_file():
        yield from _file(path)
    elif path.exists():
        raise UsageError(f"{path} is neither a file nor a folder")
    elif os.sep in target or path.suffix in {*ZIPS, ".so", ".a", ".o", ".cubin", ".fatbin", ".ptx"}:
        raise UsageError(f"{path} does not exist", fix="name a file, a folder or a package")
    elif env is None:
        raise MachineError(
            f"{target} is no file, and there is no training stack to look for a package in",
            fix="verl-p40 stack install, or name a file, wheel or folder",
        )
    else:
        yield from _package(target, env.site_packages)


def _file(path: Path) -> Iterator[Source]:
    name = path.name.lower()
    if name.endswith(ZIPS):
        yield from _zip(path)
    elif name.endswith(TARS):
        yield from _tar(path)
    else:
        with _reading(path) as file:
            head = file.read(_HEAD)
        if not head:
            raise DataError(f"{path} is empty")
        if not recognised(head):
            raise UsageError(
                f"{path} is no ELF file, archive, fatbin, cubin, PTX text or wheel",
                fix="name a .so, .o, .a, executable, .whl, .fatbin, .cubin, .ptx or a folder",
            )
        yield _on_disk(path, str(path))


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            yield file
    except PermissionError:
        raise MachineError(f"{path}: no permission to read it") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def _on_disk(path: Path, name: str) -> Source:
    @contextmanager
    def opened() -> Iterator[View]:
        with (
            _reading(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            yield View.whole(content)

    return Source(name, path.stat().st_size, opened)


def _folder(path: Path, base: Path | None = None) -> Iterator[Source]:
    for parent, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            yield from _entry(Path(parent) / name, base or path)


def _entry(file: Path, base: Path) -> Iterator[Source]:
    # A link is either met again under its own name, or leads out of the folder.
    if file.is_symlink() or not file.is_file() or file.stat().st_size < 64:
        return
    with _reading(file) as stream:
        head = stream.read(_HEAD)
    if recognised(head):
        yield _on_disk(file, file.relative_to(base).as_posix())


def _package(name: str, site: Path) -> Iterator[Source]:
    """The files of an installed package, from the records of what was installed."""
    wanted = canonicalize_name(name)
    chosen = []
    for info in sorted(site.glob("*.dist-info")):
        try:
            header = HeaderParser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
            record = (info / "RECORD").read_text(encoding="utf-8")
        except OSError:
            continue
        files = [line.rpartition(",")[0].rpartition(",")[0] for line in record.splitlines()]
        files = [file.strip('"') for file in files]
        imported = name.replace(".", "/")
        if canonicalize_name(header["Name"] or "") == wanted:
            chosen += files
        elif any(file.startswith((f"{imported}/", f"{imported}.")) for file in files):
            chosen += [file for file in files if file.startswith((f"{imported}/", f"{imported}."))]
    if not chosen:
        if (site / name).is_dir():
            yield from _folder(site / name, site)
            return
        raise UsageError(
            f"{name} is neither a file nor a package installed in {site}",
            fix="name a file, wheel or folder, or a package by its distribution or import name",
        )
    for file in sorted(set(chosen)):
        path = site / file
        if path.suffix not in {".py", ".pyc", ".txt", ".h", ".json"}:
            yield from _entry(path, site)


def _zip(path: Path) -> Iterator[Source]:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.file_size < 64 or member.is_dir():
                    continue
                with archive.open(member) as stream:
                    head = stream.read(_HEAD)
                if recognised(head):
                    yield _member(
                        member.filename,
                        member.file_size,
                        lambda member=member: archive.open(member),  # type: ignore[misc]
                    )
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(
            f"{path} is not a readable zip archive: {error}", fix="download it again"
        ) from None


def _tar(path: Path) -> Iterator[Source]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None or member.size < 64:
                    continue
                if recognised(stream.read(_HEAD)):
                    stream.seek(0)
                    yield _member(member.name, member.size, lambda stream=stream: stream)  # type: ignore[misc]
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(
            f"{path} is not a readable tar archive: {error}", fix="download it again"
        ) from None


def _member(name: str, size: int, stream: Callable[[], IO[bytes]]) -> Source:
    """A file inside of an archive: unpacked when it is opened, to a file without a name."""

    @contextmanager
    def opened() -> Iterator[View]:
        with tempfile.TemporaryFile(prefix="verl-p40-") as sink:
            try:
                with stream() as source:
                    while chunk := source.read(_CHUNK):
                        sink.write(chunk)
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise Damaged(f"cannot be unpacked: {error}") from None
            sink.flush()
            with mmap.mmap(sink.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield View.whole(content)

    return Source(name, size, opened)
