from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from samples import HOST, P40, sample

from verl_p40.hardware.sample import GpuSample
from verl_p40.monitor import tables, view
from verl_p40.monitor.finder import Active
from verl_p40.train.folder import RunFolder

RUN = Path("/runs/p40-ppo-1a2b3c")


def _console(out: io.StringIO, *, terminal: bool = False, width: int = 160) -> Console:
    return Console(file=out, force_terminal=terminal, width=width, color_system=None)


def _screen(made: view.Sample) -> str:
    out = io.StringIO()
    _console(out).print(view.screen(made))
    return out.getvalue()


def test_the_line_has_run_gpu_machine_and_processes() -> None:
    assert view.line(sample(RUN)) == (
        "p40-ppo-1a2b3c  step 12/60  reward 0.412  6.50 s/step | "
        "GPU 0 100 % 22.2/22.4 GiB 172/250 W 82 C 1303 MHz P0 | "
        "CPU 38 %  RAM 6.0/24.0 GiB  disk 40.0 GiB free | "
        "31 processes  RSS 4.0 GiB  PSS 3.0 GiB  CPU 174 %"
    )


def test_what_is_not_known_is_left_out_of_the_line() -> None:
    silent = replace(
        P40,
        utilization_percent=None,
        memory_used_mib=None,
        power_w=None,
        temperature_c=None,
        sm_clock_mhz=None,
        pstate=None,
        throttle=None,
    )
    first = replace(HOST, cpu_percent=None, disk_free=None)
    text = view.line(sample(RUN, gpus=(silent,), tree=None, host=first))
    assert text.endswith("| GPU 0 does not answer | RAM 6.0/24.0 GiB")
    assert "None" not in text


def test_what_holds_the_clocks_back_is_in_the_line_but_idling() -> None:
    hot = replace(P40, throttle=("sw_power_cap", "hw_thermal_slowdown"))
    assert "[sw_power_cap hw_thermal_slowdown]" in view.line(sample(RUN, gpus=(hot,)))
    assert "[" not in view.line(sample(RUN, gpus=(replace(P40, throttle=("gpu_idle",)),)))


def test_lines_come_every_so_often_and_not_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    shown = view.LineView(_console(out), every=10)
    clock = [100.0]
    monkeypatch.setattr(view.time, "monotonic", lambda: clock[0])
    for _ in range(25):
        shown.show(sample(RUN))
        clock[0] += 1.0
    assert len(out.getvalue().splitlines()) == 3
    for _ in range(25):
        shown.show(sample())
        clock[0] += 1.0
    assert len(out.getvalue().splitlines()) == 3
    shown.show(sample(RUN))
    assert len(out.getvalue().splitlines()) == 4
    assert "\x1b" not in out.getvalue()


def test_the_table_shows_everything_and_says_what_is_not_reported() -> None:
    text = _screen(sample(RUN))
    for part in (
        "p40-ppo-1a2b3c", "step 12/60", "reward 0.412", "Tesla P40", "100 %", "22747 of 22919 MiB",
        "1 process holds 22737 MiB", "172 of 250 W", "82 of 92 C", "1303 of 1531 MHz", "memory at 3615 MHz",
        "P0", "PCIe 3.0 x16", "CPU 38 % of 2 cores, load 1.25",
        "/dev/shm 0.2 GiB", "31 processes", "PSS 3.0 GiB",
    ):  # fmt: skip
        assert part in text, part
    bare = replace(P40, utilization_percent=None, power_w=None, power_limit_w=None, throttle=None)
    assert _screen(sample(RUN, gpus=(bare,))).count("not reported") == 2
    lost = GpuSample(1, "Tesla P40")
    assert "GPU 1  Tesla P40  does not answer" in _screen(sample(RUN, gpus=(P40, lost)))
    assert "waiting for one" in _screen(sample())


def test_the_table_fits_80_columns() -> None:
    hot = replace(P40, index=1, throttle=("sw_power_cap", "hw_slowdown", "hw_thermal_slowdown"))
    out = io.StringIO()
    _console(out, width=80).print(view.screen(sample(RUN, gpus=(P40, hot)), {0: [50.0] * 60}))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 6 + 7 + 3
    assert "…" not in out.getvalue()
    assert "slowed  by sw_power_cap hw_slowdown hw_thermal_slowdown" in lines


def test_the_table_says_why_there_are_no_processes_and_how_the_run_was_found() -> None:
    guessed = Active(RunFolder(RUN), held=False, others=("second",))
    text = _screen(sample(RUN, tree=None, hidden="it is elsewhere", active=guessed))
    assert "not visible: it is elsewhere" in text
    assert "judged by its files" in text
    assert "also running: second" in text


def test_heat_is_coloured_before_the_card_slows_down() -> None:
    styles = [view._heat(replace(P40, temperature_c=float(c))) for c in (60, 82, 89)]
    assert styles == ["", "yellow", "bold red"]


def test_the_live_view_draws_a_curve_and_keeps_pss() -> None:
    out = io.StringIO()
    shown = view.choose(_console(out, terminal=True), every=10, as_json=False)
    assert isinstance(shown, view.LiveView)
    made = sample(RUN)
    assert made.tree is not None
    for number in range(40):
        shown.show(
            replace(
                made,
                gpus=(replace(P40, utilization_percent=0.0 if number < 20 else 100.0),),
                tree=made.tree if number == 0 else replace(made.tree, pss=None),
            )
        )
    shown.note("a note with [brackets]")
    shown.close()
    last = out.getvalue()[out.getvalue().rindex("p40-ppo-1a2b3c") :]
    assert "▁▁▁▁▁▁▁▁▁▁██████████" in last
    assert "PSS 3.0 GiB" in last
    assert "a note with [brackets]" in out.getvalue()


def test_json_has_the_tables_columns(capsys: pytest.CaptureFixture[str]) -> None:
    shown = view.choose(_console(io.StringIO()), every=10, as_json=True)
    shown.note("waiting")
    shown.show(sample(RUN))
    shown.show(sample())
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in out.splitlines())
    assert err == "waiting\n"
    assert (first["run"]["step"], first["run"]["path"]) == (12, str(RUN))
    assert ["time", *first["gpus"][0]] == list(tables.GPU_COLUMNS)
    assert ["time", *first["host"]] == list(tables.HOST_COLUMNS)
    assert second["run"] is None
