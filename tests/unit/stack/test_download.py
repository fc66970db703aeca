"""One file over a bad line, against a server that really cuts, refuses and lies."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flaky import QUICK, Resource, Site, sha256

from verl_p40.errors import ExitCode, NetworkError
from verl_p40.stack import http
from verl_p40.stack.download import download, part_size

BODY = random.Random(7).randbytes(900_000)
HASH = sha256(BODY)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "file.whl"


@pytest.fixture
def line() -> Iterator[Site]:
    with Site() as site:
        site.resources["/f"] = Resource(BODY)
        yield site


def fetch(site: Site, target: Path, digest: str = HASH) -> list[int]:
    told: list[int] = []
    download(f"{site.root}/f", target, digest, http.session(), on_bytes=told.append, policy=QUICK)
    return told


def test_a_file_arrives_whole(line: Site, target: Path) -> None:
    told = fetch(line, target)
    assert target.read_bytes() == BODY
    assert sum(told) == len(BODY)
    assert [path.name for path in target.parent.iterdir()] == ["file.whl"]


def test_a_cut_connection_is_resumed_inside_the_file(line: Site, target: Path) -> None:
    line.resources["/f"].cuts = [300_000, 250_000]
    told = fetch(line, target)
    assert target.read_bytes() == BODY
    assert sum(told) == len(BODY)
    first, *later = line.asked("/f")
    assert first is None
    starts = [int(str(given).removeprefix("bytes=").rstrip("-")) for given in later]
    assert 0 < starts[0] <= 300_000 < starts[1] <= 550_000


def test_a_line_that_drops_often_but_moves_on_still_finishes(line: Site, target: Path) -> None:
    """More failures than ``attempts``: only failures without a new byte count."""
    line.resources["/f"].cuts = [100_000] * 8
    fetch(line, target)
    assert target.read_bytes() == BODY
    assert len(line.asked("/f")) > QUICK.attempts


def test_the_part_of_a_killed_process_is_continued(line: Site, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("file.whl.part").write_bytes(BODY[:500_000])
    told = fetch(line, target)
    assert line.asked("/f") == ["bytes=500000-"]
    assert sum(told) == len(BODY) - 500_000


def test_a_part_that_is_already_the_whole_file(line: Site, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("file.whl.part").write_bytes(BODY)
    fetch(line, target)
    assert target.read_bytes() == BODY


def test_a_part_longer_than_the_file_is_thrown_away(line: Site, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("file.whl.part").write_bytes(BODY + b"more")
    fetch(line, target)
    assert target.read_bytes() == BODY


def test_a_damaged_part_is_downloaded_again_from_zero(line: Site, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("file.whl.part").write_bytes(b"x" * 500_000)
    told = fetch(line, target)
    assert target.read_bytes() == BODY
    assert line.asked("/f") == ["bytes=500000-", None]
    assert sum(told) == len(BODY) - 500_000


@pytest.mark.parametrize("habit", ["ignores_range", "wrong_range"])
def test_a_server_that_cannot_resume(line: Site, target: Path, habit: str) -> None:
    setattr(line.resources["/f"], habit, True)
    line.resources["/f"].cuts = [300_000]
    told = fetch(line, target)
    assert target.read_bytes() == BODY
    assert sum(told) == len(BODY)


def test_a_wrong_hash_names_both_and_leaves_nothing(line: Site, target: Path) -> None:
    with pytest.raises(NetworkError) as caught:
        fetch(line, target, "0" * 64)
    assert HASH in caught.value.message
    assert "0" * 64 in caught.value.message
    assert caught.value.exit_code == ExitCode.NETWORK
    assert not target.exists()
    assert not target.with_name("file.whl.part").exists()


def test_a_missing_file_is_said_at_once(line: Site, target: Path) -> None:
    line.resources["/f"].statuses = [404]
    with pytest.raises(NetworkError, match="HTTP 404"):
        fetch(line, target)
    assert len(line.asked("/f")) == 1


def test_a_server_that_is_busy_for_a_moment(line: Site, target: Path) -> None:
    line.resources["/f"].statuses = [503, 429]
    fetch(line, target)
    assert target.read_bytes() == BODY


def test_a_server_that_stays_busy(line: Site, target: Path) -> None:
    line.resources["/f"].statuses = [503] * 9
    with pytest.raises(
        NetworkError, match=r"file\.whl: download failed 3 times in a row: HTTP 503"
    ):
        fetch(line, target)
    assert len(line.asked("/f")) == QUICK.attempts


def test_nobody_listens(target: Path) -> None:
    with Site() as gone:
        url = f"{gone.root}/f"
    with pytest.raises(NetworkError, match="no connection"):
        download(url, target, HASH, http.session(), policy=QUICK)


def test_two_at_once_download_it_once(line: Site, target: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(fetch, line, target) for _ in range(2)]:
            future.result()
    assert target.read_bytes() == BODY
    assert len(line.asked("/f")) == 1


def test_a_part_that_another_process_finishes_meanwhile(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"12")
    look = Path.stat

    def then_gone(path: Path, **named: Any) -> os.stat_result:
        found = look(path, **named)
        part.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "stat", then_gone)
    assert part_size(target) == 2
    assert part_size(target) == 0


def test_a_password_in_the_address_is_not_shown() -> None:
    assert http.redact("https://me:secret@host:1/simple/") == "https://host:1/simple/"
