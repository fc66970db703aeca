"""Pinned files and whole locks, downloaded by hash into a cache that survives a broken line.

The cache is ``<cache_home>/files/<sha256>/<filename>``; an unfinished file has the suffix
``.part`` and is continued. Deleting the cache is always safe.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import requests
from packaging.markers import default_environment
from packaging.tags import Tag, compatible_tags, cpython_tags, platform_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from verl_p40.errors import DiskError, NetworkError
from verl_p40.stack import http, lockfile, paths, pins
from verl_p40.stack.download import download, part_size, sha256_of
from verl_p40.stack.http import RetryPolicy
from verl_p40.stack.index import IndexFile, SimpleIndex, index_url
from verl_p40.stack.lockfile import Locked
from verl_p40.stack.pins import FlavorName
from verl_p40.stack.progress import Report, Silent

PARALLEL = 4
SPARE_BYTES = 200_000_000
"""Left free on the disk whatever we do: a full disk breaks more than this program."""


@dataclass(frozen=True)
class Wanted:
    """A file chosen for one interpreter. ``size`` is in bytes, 0 where the index does not say."""

    project: str
    filename: str
    url: str
    sha256: str
    size: int

    @property
    def path(self) -> Path:
        return cached_path(self.sha256, self.filename)


def cached_path(sha256: str, filename: str) -> Path:
    """Where the cache keeps a file, there or not."""
    return paths.cache_home() / "files" / sha256 / filename


def fetch_pinned(
    name: str, report: Report | None = None, policy: RetryPolicy | None = None
) -> Path:
    """The pinned file called ``name`` in ``pins.toml`` (``verl``, ``vllm-sdist``, ...).

    Downloads it unless the cache has it; the hash is checked either way.

    Raises:
        UsageError: no such release.
        NetworkError: it cannot be had, or what is served has another hash.
    """
    report = report or Silent()
    release = pins.load().find_release(name)
    target = cached_path(release.sha256, release.filename)
    if target.exists():
        if sha256_of(target) == release.sha256:
            return target
        target.unlink()
    session = http.session()
    index = SimpleIndex(index_url(release.index), session, policy)
    found = [f for f in index.files(release.project) if f.filename == release.filename]
    if not found:
        raise NetworkError(
            f"the index does not have {release.filename}",
            fix="use an index that mirrors all files (UV_DEFAULT_INDEX, PIP_INDEX_URL)",
        )
    if found[0].sha256 not in (None, release.sha256):
        raise NetworkError(
            f"{release.filename}: the index says sha256 {found[0].sha256}, "
            f"the pinned one is {release.sha256}",
            fix="this index serves another file under this name: use another index",
        )
    wanted = Wanted(
        release.project, release.filename, found[0].url, release.sha256, found[0].size or 0
    )
    _download_all([wanted], session, report, policy)
    return target


@cache
def _tags(python: str) -> dict[Tag, int]:
    """Wheel tags of CPython ``python`` (``3.10``) on this platform → rank, 0 is best."""
    major, minor = (int(part) for part in python.split("."))
    platforms = list(platform_tags())
    ordered = [
        *cpython_tags((major, minor), platforms=platforms),
        *compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(ordered)))}


def marker_environment(python: str) -> dict[str, str]:
    """PEP 508 variables for CPython ``python`` on this machine."""
    environment = {k: str(v) for k, v in default_environment().items()}
    # Only the minor version matters to our locks; .99 answers `python_full_version >= 3.10.x`.
    environment.update(python_version=python, python_full_version=f"{python}.99", extra="")
    return environment


def choose(locked: Locked, files: Iterable[IndexFile], python: str) -> IndexFile | None:
    """The best of an index's files for a line of a lock: a fitting wheel, else the sdist."""
    tags = _tags(python)
    best: tuple[int, IndexFile] | None = None
    for file in files:
        if file.sha256 not in locked.hashes:
            continue
        if file.filename.endswith(".whl"):
            try:
                _, _, _, wheel_tags = parse_wheel_filename(file.filename)
            except InvalidWheelFilename:
                continue
            ranks = [tags[tag] for tag in wheel_tags if tag in tags]
        else:
            ranks = [len(tags)]
        if ranks and (best is None or min(ranks) < best[0]):
            best = (min(ranks), file)
    return best[1] if best else None


def resolve(
    lock_name: str, python: str, flavor: FlavorName | None = None, policy: RetryPolicy | None = None
) -> list[Wanted]:
    """Which file of which index each line of a lock means for CPython ``python``.

    The answer is kept beside the cache, so that an interrupted install starts again at once.

    Raises:
        NetworkError: the index cannot be reached, or lacks a fitting file for a line.
    """
    lock = lockfile.lock_path(lock_name)
    memo = paths.cache_home() / "resolved" / f"{lockfile.digest(lock)[:16]}-py{python}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return [Wanted(**item) for item in json.loads(memo.read_text(encoding="utf-8"))]
    environment = marker_environment(python)
    lines = [line for line in lockfile.parse(lock) if line.applies(environment)]
    session = http.session()
    special = _special_indexes(flavor, session, policy)
    default = SimpleIndex(index_url("packages"), session, policy)

    def one(line: Locked) -> Wanted:
        index = special.get(line.name, default)
        file = choose(line, index.files(line.name), python)
        if file is None or file.sha256 is None:
            raise NetworkError(
                f"the index has no file of {line.name}=={line.version} for Python {python} "
                f"on this platform with a hash of {lock_name}",
                fix="use an index that mirrors all files; the training stack is for Linux x86_64",
            )
        return Wanted(line.name, file.filename, file.url, file.sha256, file.size or 0)

    with ThreadPoolExecutor(max_workers=8) as pool:
        wanted = list(pool.map(one, lines))
    memo.parent.mkdir(parents=True, exist_ok=True)
    fresh = memo.with_suffix(".new")
    fresh.write_text(json.dumps([asdict(item) for item in wanted], indent=1), encoding="utf-8")
    fresh.rename(memo)
    return wanted


def _special_indexes(
    flavor: FlavorName | None, session: requests.Session, policy: RetryPolicy | None
) -> Mapping[str, SimpleIndex]:
    if flavor is None:
        return {}
    loaded = pins.load()
    releases = [loaded.release[name] for name in loaded.flavor[flavor].release]
    return {
        release.project: SimpleIndex(index_url(release.index), session, policy)
        for release in releases
    }


def missing(wanted: Iterable[Wanted]) -> list[Wanted]:
    """Those of ``wanted`` that the cache does not hold."""
    return [item for item in wanted if not item.path.exists()]


def bytes_missing(wanted: Iterable[Wanted]) -> int:
    """Bytes still to download, parts of broken downloads counted as there."""
    total = 0
    for item in missing(wanted):
        total += max(item.size - part_size(item.path), 0)
    return total


def check_disk(folder: Path, needed: int, purpose: str) -> None:
    """Refuse to begin what will not fit; ``needed`` is in bytes.

    Raises:
        DiskError: ``folder``'s disk has less; the message says both numbers.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE_BYTES:
        raise DiskError(
            f"{purpose} needs {(needed + SPARE_BYTES) / 1e9:.1f} GB on the disk of {folder}, "
            f"which has {free / 1e9:.1f} GB free",
            fix="free some space, or set VERL_P40_HOME to a folder on another disk",
        )


def fetch_lock(
    wanted: list[Wanted], report: Report | None = None, policy: RetryPolicy | None = None
) -> list[Path]:
    """Download what the cache lacks of ``wanted``; returns every file's path, in order.

    Stopped in any way, the next call continues, inside the file that broke.

    Raises:
        NetworkError, DiskError: as :func:`verl_p40.stack.download.download`.
    """
    todo = missing(wanted)
    if todo:
        check_disk(paths.cache_home(), bytes_missing(wanted), "downloading the packages")
        _download_all(todo, http.session(), report or Silent(), policy)
    return [item.path for item in wanted]


class _StoppedError(Exception):
    """Another download failed: this one's bytes no longer matter."""


def _download_all(
    todo: list[Wanted], session: requests.Session, report: Report, policy: RetryPolicy | None
) -> None:
    stop = threading.Event()

    def one(item: Wanted) -> None:
        def on_bytes(size: int) -> None:
            if stop.is_set():
                raise _StoppedError
            report.advance(item.filename, size)

        download(item.url, item.path, item.sha256, session, on_bytes=on_bytes, policy=policy)
        report.finished(item.filename)

    # Largest first: the big wheels take most of the time and should not start last.
    todo = sorted(todo, key=lambda item: -item.size)
    done = sum(part_size(item.path) for item in todo)
    report.begin(len(todo), sum(item.size for item in todo), done)
    pool = ThreadPoolExecutor(max_workers=PARALLEL)
    try:
        futures = [pool.submit(one, item) for item in todo]
        ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
        stop.set()
        errors = [error for future in ended if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _StoppedError):
                raise error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        report.end()
