"""One file over a bad line: resumed where it broke, checked by hash, then given its name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import requests
from tenacity import RetryError, Retrying, retry_if_exception_type

from verl_p40.errors import DiskError, NetworkError
from verl_p40.stack import http
from verl_p40.stack.hold import exclusive
from verl_p40.stack.http import RetryableError, RetryPolicy

CHUNK = 1 << 15
"""Bytes a read. A connection that breaks loses what its last read had gathered: keep it small."""

OnBytes = Callable[[int], None]
"""Told about each piece: bytes more than :func:`part_size` said before (negative: thrown away)."""


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as source:
        while piece := source.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def part_size(target: Path) -> int:
    """Bytes that an earlier, broken download of ``target`` left."""
    return _size(target.with_name(target.name + ".part"))


def _size(path: Path) -> int:
    """0 where there is no such file, or no longer: another process may finish it meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def download(
    url: str,
    target: Path,
    sha256: str,
    session: requests.Session,
    *,
    on_bytes: OnBytes = lambda _: None,
    policy: RetryPolicy | None = None,
) -> None:
    """Download ``url`` to ``target``, continuing a ``.part`` file that an earlier try left.

    ``target`` exists only complete and with the right hash. Two processes may ask for the same
    file: the second waits and finds it there.

    Raises:
        NetworkError: no success after ``policy.attempts`` tries in a row that brought nothing,
            a status that will not change, or a complete file with another hash.
        DiskError: the disk filled up.
    """
    policy = policy or RetryPolicy()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(target.name + ".lock")
    known = part_size(target)
    with exclusive(lock):
        if target.exists():
            lock.unlink(missing_ok=True)
            on_bytes(target.stat().st_size - known)
            return
        part = target.with_name(target.name + ".part")
        started_with = part_size(target)
        on_bytes(started_with - known)
        _fill(url, part, session, on_bytes, policy)
        found = sha256_of(part)
        if found != sha256 and started_with:
            # The old part may have been cut off in the middle of a write: once more, from zero.
            on_bytes(-part.stat().st_size)
            part.unlink()
            _fill(url, part, session, on_bytes, policy)
            found = sha256_of(part)
        if found != sha256:
            part.unlink()
            raise NetworkError(
                f"{target.name}: sha256 is {found}, the pinned one is {sha256}",
                fix="the index or a proxy serves another file under this name: use another index",
            )
        part.rename(target)
        lock.unlink(missing_ok=True)


def _fill(
    url: str, part: Path, session: requests.Session, on_bytes: OnBytes, policy: RetryPolicy
) -> None:
    """Bring ``part`` to its full length, however often the connection breaks."""
    fruitless = 0

    def attempt() -> None:
        nonlocal fruitless
        before = _size(part)
        try:
            _one_request(url, part, session, on_bytes, policy)
        except RetryableError:
            after = _size(part)
            fruitless = 0 if after > before else fruitless + 1
            raise

    retrying = Retrying(
        stop=lambda _: fruitless >= policy.attempts,
        wait=policy.wait,
        retry=retry_if_exception_type(RetryableError),
    )
    try:
        retrying(attempt)
    except RetryError as error:
        cause = error.last_attempt.exception()
        raise NetworkError(
            f"{part.name.removesuffix('.part')}: download failed {policy.attempts} times in a row: "
            f"{cause}",
            fix="check the network and run the same command again: it continues where it stopped",
        ) from cause


def _one_request(
    url: str, part: Path, session: requests.Session, on_bytes: OnBytes, policy: RetryPolicy
) -> None:
    have = _size(part)
    # identity: a resumed range of a compressed body would be a range of something else
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with session.get(url, headers=headers, stream=True, timeout=policy.timeout) as response:
            if response.status_code == 416:
                if _total(response) == have:
                    return  # the part is the whole file
                _restart(part, have, on_bytes)
                raise RetryableError("the server's file is shorter than the part we have")
            http.check_status(response)
            start = _start_of(response) if response.status_code == 206 else 0
            if start not in (0, have):
                _restart(part, have, on_bytes)
                raise RetryableError("the server answered with another range than asked for")
            if have and start == 0:
                _restart(part, have, on_bytes)
                have = 0
            announced = response.headers.get("Content-Length", "")
            expected = have + int(announced) if announced.isdigit() else None
            have += _append(response, part, on_bytes)
            if expected is not None and have < expected:
                raise RetryableError(f"the connection ended at {have} of {expected} bytes")
    except requests.exceptions.SSLError as error:
        raise NetworkError(
            f"{http.redact(url)}: {http.explain(error)}",
            fix="set SSL_CERT_FILE to the certificate bundle of your network",
        ) from error
    except requests.exceptions.RequestException as error:
        raise RetryableError(f"{http.redact(url)}: {http.explain(error)}") from error


def _append(response: requests.Response, part: Path, on_bytes: OnBytes) -> int:
    written = 0
    try:
        with part.open("ab") as sink:
            for piece in response.iter_content(CHUNK):
                sink.write(piece)
                written += len(piece)
                on_bytes(len(piece))
    except requests.exceptions.RequestException:
        raise
    except OSError as error:
        raise DiskError(
            f"cannot write {part}: {error.strerror or error}", fix="free some space, run it again"
        ) from error
    return written


def _restart(part: Path, have: int, on_bytes: OnBytes) -> None:
    on_bytes(-have)
    part.unlink()


def _start_of(response: requests.Response) -> int:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match.group(1)) if match else -1


def _total(response: requests.Response) -> int:
    match = re.match(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
    return int(match.group(1)) if match else -1
