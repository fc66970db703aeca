"""The engine's stream of events, as recorded (engine 20.10.24), and what is shown of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from verl_p40.cli.image_progress import Bars
from verl_p40.errors import DiskError, NetworkError
from verl_p40.image.names import parse
from verl_p40.image.transfer import Moved, Silent, follow

IMAGE = parse("127.0.0.1:5055/a/b:1")
DIGEST = "sha256:28317e7a45ca40aee335bb507f58debc26ff227c5e8292a1f8b5da3f5883ee9f"


def event(status: str, layer: str = "", current: int = 0, total: int = 0) -> dict[str, Any]:
    detail = {"current": current, "total": total} if total else {}
    document: dict[str, Any] = {"status": status, "progressDetail": detail}
    return {**document, "id": layer} if layer else {"status": status}


PULL = [
    event("Pulling from a/b", "1"),
    event("Pulling fs layer", "67499fbdfcf5"),
    event("Pulling fs layer", "0a1b2c3d4e5f"),
    event("Waiting", "0a1b2c3d4e5f"),
    event("Downloading", "67499fbdfcf5", 36445, 1064355),
    event("Downloading", "67499fbdfcf5", 1064355, 1064355),
    event("Verifying Checksum", "67499fbdfcf5"),
    event("Download complete", "67499fbdfcf5"),
    event("Extracting", "67499fbdfcf5", 32768, 1064355),
    event("Extracting", "67499fbdfcf5", 1064355, 1064355),
    event("Pull complete", "67499fbdfcf5"),
    event("Already exists", "0a1b2c3d4e5f"),
    event(f"Digest: {DIGEST}"),
    event("Status: Downloaded newer image for 127.0.0.1:5055/a/b:1"),
]
PUSH = [
    event("The push refers to repository [127.0.0.1:5055/a/b]"),
    event("Preparing", "55d1f8654c76"),
    event("Pushing", "55d1f8654c76", 33280, 1982256),
    event("Pushing", "55d1f8654c76", 1986560, 1982256),
    event("Pushed", "55d1f8654c76"),
    event(f"1: digest: {DIGEST} size: 527"),
    {"progressDetail": {}, "aux": {"Tag": "1", "Digest": DIGEST, "Size": 527}},
]
REFUSED = [
    event("The push refers to repository [127.0.0.1:5056/a/b]"),
    event("Preparing", "55d1f8654c76"),
    {
        "errorDetail": {"message": "no basic auth credentials"},
        "error": "no basic auth credentials",
    },
]


def shown(events: list[dict[str, Any]], *, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    with Bars(console) as bars:
        follow(events, IMAGE, bars)
    return out.getvalue()


def test_the_digest_and_the_closing_words() -> None:
    closing = "Downloaded newer image for 127.0.0.1:5055/a/b:1"
    assert follow(PULL, IMAGE, Silent()) == (DIGEST, closing)
    assert follow(PUSH, IMAGE, Silent()) == (DIGEST, "")
    assert follow(PUSH[:-1], IMAGE, Silent()) == (DIGEST, ""), "without aux"


def test_an_error_in_the_stream_is_ours() -> None:
    with pytest.raises(NetworkError, match=r"refuses 127\.0\.0\.1:5055/a/b:1"):
        follow(REFUSED, IMAGE, Silent())
    with pytest.raises(DiskError):
        follow([{"error": "write /x: no space left on device"}], IMAGE, Silent())


def test_plain_lines() -> None:
    assert shown(PULL) == (
        "67499fbdfcf5: pull complete, 1.1 MB (1 of 2 layers)\n"
        "0a1b2c3d4e5f: already exists (2 of 2 layers)\n"
    )
    assert shown(PUSH) == (
        "The push refers to repository [127.0.0.1:5055/a/b]\n"
        "55d1f8654c76: pushed, 2.0 MB (1 of 1 layers)\n"
    )


def test_a_countdown_is_one_line() -> None:
    layer = "55d1f8654c76"
    waits = [*range(5, 0, -1), *range(10, 0, -1)]
    events = [event("Preparing", layer)]
    for wait in waits:
        events.append(event(f"Retrying in {wait} second{'s' if wait > 1 else ''}", layer))
    assert shown(events) == (
        "55d1f8654c76: retrying in 5 seconds\n55d1f8654c76: retrying in 10 seconds\n"
    )


def test_bytes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_p40.cli.image_progress.PLAIN_EVERY", 0.0)
    assert "downloading: 36.4 kB of 1.1 MB\n" in shown(PULL)


def test_a_bar_a_layer() -> None:
    text = shown(PULL, terminal=True)
    assert "67499fbdfcf5" in text and "0a1b2c3d4e5f" in text
    assert "Pull complete" in text and "Already exists" in text


def test_the_name_to_keep() -> None:
    moved = Moved(IMAGE, DIGEST, "", 1.234)
    assert moved.as_json() == {
        "image": "127.0.0.1:5055/a/b:1",
        "digest": DIGEST,
        "pinned": f"127.0.0.1:5055/a/b@{DIGEST}",
        "status": "",
        "seconds": 1.23,
    }
