from __future__ import annotations

import io

import pytest
from rich.console import Console

from verl_p40.stack import progress
from verl_p40.stack.progress import ConsoleReport


def transcript(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    sink = io.StringIO()
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.0)
    console = Console(file=sink, force_terminal=terminal, width=120, highlight=False)
    with ConsoleReport(console) as report:
        report.say("downloading [stack]")
        report.begin(2, 3_000_000, 1_000_000)
        report.advance("a.whl", 500_000)
        report.finished("a.whl")
        report.advance("b.whl", 1_500_000)
        report.finished("b.whl")
    return sink.getvalue()


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said, first, last = transcript(monkeypatch, terminal=False).splitlines()
    assert said == "downloading [stack]"
    assert first.startswith("downloaded 1.5 MB of 3.0 MB, 0/2 files, ")
    assert last.startswith("downloaded 3.0 MB of 3.0 MB, 1/2 files, ")
    assert last.endswith("0:00 left")
    assert "\x1b" not in first


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = transcript(monkeypatch, terminal=True)
    assert "2/2 files" in text
    assert "3.0/3.0 MB" in text


def test_speed_does_not_count_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed download of 1 GB must not claim a gigabyte a second."""
    clock = iter(float(second) for second in range(0, 100, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    sink = io.StringIO()
    report = ConsoleReport(Console(file=sink, force_terminal=False, width=120))
    report.begin(1, 2_000_000_000, 1_000_000_000)
    report.advance("a.whl", 1_000_000)
    assert "kB/s" in sink.getvalue()
