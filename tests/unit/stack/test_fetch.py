"""Choosing files by hash and tags, and whole locks from a local index."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flaky import QUICK, Site, sha256

from verl_p40.errors import DiskError, NetworkError, UsageError
from verl_p40.stack import fetch, lockfile, paths, pins
from verl_p40.stack.index import IndexFile
from verl_p40.stack.pins import ReleasePin


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setattr(paths, "locks_dir", lambda: folder)
    return folder


def lock(folder: Path, *lines: tuple[str, bytes]) -> str:
    text = "".join(f"{head} \\\n    --hash=sha256:{sha256(body)}\n" for head, body in lines)
    (folder / "x.txt").write_text(f"# a lock\n{text}")
    return "x.txt"


def locked(tmp_path: Path, *hashes: str) -> lockfile.Locked:
    path = tmp_path / "one.txt"
    path.write_text("demo==1.0 " + " ".join(f"--hash=sha256:{h}" for h in hashes))
    return lockfile.parse(path)[0]


A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_the_wheel_of_the_interpreter_asked_for(tmp_path: Path) -> None:
    files = [
        IndexFile("demo-1.0.tar.gz", "u", C),
        IndexFile("demo-1.0-cp310-cp310-manylinux_2_17_x86_64.whl", "u", A),
        IndexFile("demo-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", "u", B),
    ]
    line = locked(tmp_path, A, B, C)
    for python, wanted in (("3.10", A), ("3.11", B), ("3.12", C)):
        chosen = fetch.choose(line, files, python)
        assert chosen is not None
        assert chosen.sha256 == wanted


def test_a_specific_wheel_beats_a_general_one_and_foreign_ones_do_not_count(tmp_path: Path) -> None:
    files = [
        IndexFile("demo-1.0-py3-none-any.whl", "u", A),
        IndexFile("demo-1.0-cp311-cp311-win_amd64.whl", "u", C),
        IndexFile("demo-1.0-cp311-abi3-manylinux_2_17_x86_64.whl", "u", B),
    ]
    chosen = fetch.choose(locked(tmp_path, A, B, C), files, "3.11")
    assert chosen is not None
    assert chosen.sha256 == B


def test_a_file_with_another_hash_is_never_chosen(tmp_path: Path) -> None:
    files = [IndexFile("demo-1.0-py3-none-any.whl", "u", B)]
    assert fetch.choose(locked(tmp_path, A), files, "3.11") is None


def test_a_lock_is_downloaded_and_the_choice_is_remembered(site: Site, locks: Path) -> None:
    site.publish("one", "one-1-py3-none-any.whl", b"1" * 1000)
    site.publish("two", "two-2.tar.gz", b"2" * 2000)
    name = lock(
        locks,
        ("one==1", b"1" * 1000),
        ("two==2", b"2" * 2000),
        ('old==3 ; python_full_version < "3.11"', b"never published"),
    )
    wanted = fetch.resolve(name, "3.11", policy=QUICK)
    assert fetch.bytes_missing(wanted) == 3000
    found = fetch.fetch_lock(wanted, policy=QUICK)
    assert [path.read_bytes()[:1] for path in found] == [b"1", b"2"]
    asked = len(site.log)
    assert fetch.fetch_lock(fetch.resolve(name, "3.11", policy=QUICK), policy=QUICK) == found
    assert len(site.log) == asked, "nothing may be asked again"


def test_a_file_the_index_lacks(site: Site, locks: Path) -> None:
    site.publish("one", "one-1-py3-none-any.whl", b"another build")
    name = lock(locks, ("one==1", b"the pinned build"))
    with pytest.raises(NetworkError, match=r"no file of one==1 for Python 3\.11"):
        fetch.resolve(name, "3.11", policy=QUICK)


def test_one_bad_file_stops_the_rest_and_keeps_what_is_done(site: Site, locks: Path) -> None:
    site.publish("one", "one-1-py3-none-any.whl", b"1" * 1000)
    site.publish("two", "two-2-py3-none-any.whl", b"2" * 2000).statuses = [404]
    name = lock(locks, ("one==1", b"1" * 1000), ("two==2", b"2" * 2000))
    wanted = fetch.resolve(name, "3.11", policy=QUICK)
    with pytest.raises(NetworkError, match="HTTP 404"):
        fetch.fetch_lock(wanted, policy=QUICK)
    fetch.fetch_lock(wanted, policy=QUICK)
    assert not fetch.missing(wanted)


def test_too_little_disk_is_said_before_the_first_byte(
    site: Site, locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish("one", "one-1-py3-none-any.whl", b"1" * 1000)
    wanted = fetch.resolve(lock(locks, ("one==1", b"1" * 1000)), "3.11", policy=QUICK)
    monkeypatch.setattr(fetch, "SPARE_BYTES", 10**18)
    with pytest.raises(DiskError, match=r"needs 1000000000\.0 GB .* has \d+\.\d GB free"):
        fetch.fetch_lock(wanted, policy=QUICK)
    assert site.asked("/files/one-1-py3-none-any.whl") == []


def test_a_killed_process_is_continued_inside_the_file(
    site: Site, locks: Path, home: Path, tmp_path: Path
) -> None:
    """kill -9 in the middle of a download, then the same call again."""
    body = os.urandom(8_000_000)
    slow = site.publish("big", "big-1-py3-none-any.whl", body)
    # Half, then silence (the server sends no more, the client waits): a time to kill it.
    slow.cuts = [4_000_000]
    name = lock(locks, ("big==1", body))
    code = (
        "from pathlib import Path\n"
        "from verl_p40.stack import fetch, paths, http\n"
        f"paths.locks_dir = lambda: Path({str(locks)!r})\n"
        "policy = http.RetryPolicy(attempts=1000, first_wait=60, longest_wait=60)\n"
        f"fetch.fetch_lock(fetch.resolve({name!r}, '3.11'), policy=policy)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    part = home / "cache" / "files" / sha256(body) / "big-1-py3-none-any.whl.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size >= 3_000_000):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size
    (found,) = fetch.fetch_lock(fetch.resolve(name, "3.11", policy=QUICK), policy=QUICK)
    assert found.read_bytes() == body
    assert site.asked("/files/big-1-py3-none-any.whl") == [None, f"bytes={kept}-"]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A pin of our own beside the real ones."""
    body = b"the release"
    release = ReleasePin(
        project="demo",
        version="1",
        filename="demo-1.tar.gz",
        sha256=sha256(body),
        index="packages",
        why="only for this test",
    )
    loaded = pins.load()
    changed = loaded.model_copy(update={"release": {**loaded.release, "demo": release}})
    monkeypatch.setattr(pins, "load", lambda: changed)
    return body


def test_a_pinned_file_by_name(site: Site, pinned: bytes) -> None:
    site.publish("demo", "demo-1.tar.gz", pinned)
    path = fetch.fetch_pinned("demo", policy=QUICK)
    assert path.read_bytes() == pinned
    path.write_bytes(b"damaged on disk")
    assert fetch.fetch_pinned("demo", policy=QUICK).read_bytes() == pinned


def test_an_index_with_another_file_under_the_name(site: Site, pinned: bytes) -> None:
    site.publish("demo", "demo-1.tar.gz", b"something else")
    with pytest.raises(NetworkError) as caught:
        fetch.fetch_pinned("demo", policy=QUICK)
    assert sha256(pinned) in caught.value.message
    assert sha256(b"something else") in caught.value.message


def test_an_index_that_lies_about_the_hash(site: Site, pinned: bytes) -> None:
    site.publish("demo", "demo-1.tar.gz", b"something else", sha=sha256(pinned))
    with pytest.raises(NetworkError, match="the pinned one is"):
        fetch.fetch_pinned("demo", policy=QUICK)


def test_an_unknown_release_lists_the_known_ones(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        fetch.fetch_pinned("vrel")
    assert "vllm-sdist" in caught.value.fix


def test_a_damaged_memory_of_the_choice_is_made_again(site: Site, locks: Path) -> None:
    site.publish("one", "one-1-py3-none-any.whl", b"1")
    name = lock(locks, ("one==1", b"1"))
    wanted = fetch.resolve(name, "3.11", policy=QUICK)
    (memo,) = (paths.cache_home() / "resolved").iterdir()
    memo.write_text(json.dumps([{"unknown": 1}]))
    assert fetch.resolve(name, "3.11", policy=QUICK) == wanted
