from __future__ import annotations

import io

import pytest
from rich.console import Console

from verl_p40.train.metrics import StepRow
from verl_p40.train.view import LiveView, PlainView, cells, choose, clock

ROW = StepRow(12, 0.25, 0.5, 0.00042, 1.234, 1234.5, 17.25, 0.3456)


def test_cells_keep_small_numbers_visible() -> None:
    assert cells(ROW, 4_000_000_000) == [
        "12", "0.250", "0.500", "4.2e-04", "1.234", "1.2e+03", "17.2", "0.35", "4.0 GB",
    ]  # fmt: skip
    assert cells(StepRow(0, accuracy=0.1), 0) == ["0", "", "0.100", *[""] * 6]


def test_the_clock() -> None:
    assert [clock(s) for s in (0, 65.9, 3600 * 2 + 189)] == ["0:00", "1:05", "2:03:09"]


def _console(out: io.StringIO, *, terminal: bool) -> Console:
    return Console(file=out, force_terminal=terminal, width=120, color_system=None)


def test_plain_lines_are_aligned_under_one_heading() -> None:
    out = io.StringIO()
    view = choose(_console(out, terminal=False))
    assert isinstance(view, PlainView)
    view.phase("starting Ray")
    view.phase("starting Ray")
    for step in (1, 2):
        view.step(StepRow(step, 0.5, seconds=1.0), total=2, rss=0)
        view.step(StepRow(step, 0.5, seconds=1.0), total=2, rss=10)
    view.phase("training")
    view.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting Ray..."
    assert lines[1].split() == [
        "step", "reward", "greedy", "acc", "KL", "entropy", "value", "loss", "length", "s/step",
        "RSS",
    ]  # fmt: skip
    assert len(lines) == 4
    column = lines[1].index("reward") + len("reward")
    assert lines[2][column - 5 : column] == lines[3][column - 5 : column] == "0.500"
    assert "\x1b" not in out.getvalue()


def test_the_live_table_shows_steps_progress_and_time_left() -> None:
    out = io.StringIO()
    view = choose(_console(out, terminal=True))
    assert isinstance(view, LiveView)
    view.note("resuming")
    view.phase("training")
    for step in range(1, 21):
        view.step(StepRow(step, 0.5, seconds=6.0), total=60, rss=2_000_000_000)
    view.close()
    text = out.getvalue()
    assert "resuming" in text
    last = text[text.rindex("greedy acc") :]
    assert "step 20 of 60" in last
    assert "about 4:00 left" in last
    assert "2.0 GB" in last
    # Only the last fifteen steps stay in the table.
    assert sum("0.500" in line for line in last.splitlines()) == 15


def test_a_validation_row_is_completed_by_its_step() -> None:
    out = io.StringIO()
    view = LiveView(_console(out, terminal=True))
    view.step(StepRow(3, accuracy=0.4), total=9, rss=0)
    view.step(StepRow(3, 0.5, 0.4, seconds=1.0), total=9, rss=0)
    view.close()
    last = out.getvalue()[out.getvalue().rindex("greedy acc") :]
    assert sum("0.400" in line for line in last.splitlines()) == 1


def test_a_long_silence_is_broken_by_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only lines are seen (docker compose up), a validation of minutes is not a hang."""
    now = 1000.0
    monkeypatch.setattr("verl_p40.train.view.time.monotonic", lambda: now)
    out = io.StringIO()
    view = PlainView(_console(out, terminal=False))
    view.step(StepRow(1, 0.5, seconds=1.0), total=2, rss=0)
    view.phase("validating")
    for _ in range(650):
        now += 0.2
        view.phase("validating")
        view.tick(rss=0)
    assert out.getvalue().splitlines()[2:] == ["validating... 1:00", "validating... 2:00"]
