"""What a user sees: a live table on a terminal, a line now and then in a log, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from verl_p40.hardware.p40 import profile_of
from verl_p40.hardware.sample import ALARMING, GpuSample
from verl_p40.monitor import tables
from verl_p40.monitor.sample import Sample

_GIB = 1024**3
_SPARKS = "▁▂▃▄▅▆▇█"
_HISTORY = 60


class View(Protocol):
    """Where samples are shown."""

    def note(self, text: str) -> None:
        """Say one line that stays."""

    def show(self, sample: Sample) -> None:
        """Show a sample."""

    def close(self) -> None:
        """End the live part; what was shown stays."""


class LineView:
    """A line every ``every`` seconds while a run goes on: for logs and pipes."""

    def __init__(self, console: Console, *, every: float) -> None:
        self._console, self._every = console, every
        self._last = float("-inf")

    def note(self, text: str) -> None:
        self._print(f"{time.strftime('%H:%M:%S')} {text}")

    def show(self, sample: Sample) -> None:
        now = time.monotonic()
        if sample.active is None:
            # With no run there is nothing to tell, and the wait has been told.
            self._last = float("-inf")
            return
        # Half a second of grace: samples come a little late rather than early.
        if now - self._last < self._every - 0.5:
            return
        self._last = now
        self._print(f"{time.strftime('%H:%M:%S')} {line(sample)}")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class JsonView:
    """An object a sample, a line each, on standard output; notes go to standard error."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def show(self, sample: Sample) -> None:
        print(json.dumps(tables.document(sample)), flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """A table that is redrawn at each sample, with the last minute of each GPU as a curve."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._history: dict[int, deque[float]] = {}
        self._pss: int | None = None
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def note(self, text: str) -> None:
        self._live.console.print(escape(text))

    def show(self, sample: Sample) -> None:
        for gpu in sample.gpus:
            curve = self._history.setdefault(gpu.index, deque(maxlen=_HISTORY))
            curve.append(gpu.utilization_percent or 0.0)
        if sample.tree is None:
            self._pss = None
        elif sample.tree.pss is not None:
            self._pss = sample.tree.pss
        self._live.update(screen(sample, self._history, self._pss), refresh=True)

    def close(self) -> None:
        self._live.stop()


def choose(console: Console, *, every: float, as_json: bool) -> View:
    """JSON where it was asked for, the live table on a terminal, lines elsewhere."""
    if as_json:
        return JsonView()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return LineView(console, every=every)


def line(sample: Sample) -> str:
    """A sample in one line; what is not known is left out."""
    parts = [_run_words(sample)] if sample.run else []
    parts += [f"GPU {gpu.index} {' '.join(_gpu_words(gpu))}" for gpu in sample.gpus]
    host, tree = sample.host, sample.tree
    machine = [f"CPU {host.cpu_percent:.0f} %"] if host.cpu_percent is not None else []
    machine.append(f"RAM {_gib(host.ram_used)}/{_gib(host.ram_total)} GiB")
    if host.swap_used > _GIB // 10:
        machine.append(f"swap {_gib(host.swap_used)} GiB")
    if host.disk_free is not None:
        machine.append(f"disk {_gib(host.disk_free)} GiB free")
    parts.append("  ".join(machine))
    if tree is not None:
        parts.append(_tree_words(sample, None))
    return " | ".join(parts)


def screen(
    sample: Sample, history: dict[int, deque[float]] | None = None, pss: int | None = None
) -> RenderableType:
    """A sample as a table.

    Args:
        history: utilisation of each GPU in the samples before, by index.
        pss: the run's PSS in bytes where it was last read.
    """
    parts: list[RenderableType] = [_heading(sample)]
    if sample.gpus:
        parts.append(_gpu_table(sample, history or {}))
    parts.append(_machine_table(sample, pss))
    return Group(*parts)


def _heading(sample: Sample) -> Text:
    if sample.run is None or sample.active is None:
        return Text.from_markup("[bold]no run is active[/]: waiting for one")
    text = Text(sample.run.name, style="bold")
    text.append("  " + _run_words(sample, name=False), style="green")
    if not sample.active.held:
        text.append("  (nobody holds its lock: judged by its files)", style="dim")
    if sample.active.others:
        text.append(f"  also running: {', '.join(sample.active.others)}", style="dim")
    return text


def _run_words(sample: Sample, *, name: bool = True) -> str:
    run = sample.run
    if run is None:
        return ""
    words = [run.name] if name else []
    if run.step:
        words.append(f"step {run.step}" + (f"/{run.total}" if run.total else ""))
    else:
        words.append("before the first step")
    if run.reward is not None:
        words.append(f"reward {run.reward:.3f}")
    if run.seconds_per_step is not None:
        words.append(f"{run.seconds_per_step:.2f} s/step")
    return "  ".join(words)


def _gpu_words(gpu: GpuSample) -> list[str]:
    words = []
    if gpu.utilization_percent is not None:
        words.append(f"{gpu.utilization_percent:.0f} %")
    if gpu.memory_used_mib is not None and gpu.memory_total_mib is not None:
        words.append(f"{gpu.memory_used_mib / 1024:.1f}/{gpu.memory_total_mib / 1024:.1f} GiB")
    if gpu.power_w is not None:
        limit = f"/{gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
        words.append(f"{gpu.power_w:.0f}{limit} W")
    if gpu.temperature_c is not None:
        words.append(f"{gpu.temperature_c:.0f} C")
    if gpu.sm_clock_mhz is not None:
        words.append(f"{gpu.sm_clock_mhz:.0f} MHz")
    if gpu.pstate:
        words.append(gpu.pstate)
    held_back = [word for word in gpu.throttle or () if word != "gpu_idle"]
    if held_back:
        words.append(f"[{' '.join(held_back)}]")
    return words or ["does not answer"]


def _gpu_table(sample: Sample, history: dict[int, deque[float]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (
        ("GPU", "right"),
        ("model", "left"),
        ("util", "right"),
        ("last minute", "left"),
        ("memory MiB", "right"),
        ("power W", "right"),
        ("temp", "right"),
        ("SM/mem MHz", "right"),
        ("state", "left"),
        ("PCIe", "left"),
        ("clocks held back by", "left"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for gpu in sample.gpus:
        table.add_row(
            str(gpu.index),
            escape(gpu.name),
            _or_dash(gpu.utilization_percent, " %"),
            _spark(history.get(gpu.index, ())),
            _pair(gpu.memory_used_mib, gpu.memory_total_mib),
            _pair(gpu.power_w, gpu.power_limit_w),
            _temperature(gpu),
            _pair(gpu.sm_clock_mhz, gpu.memory_clock_mhz),
            gpu.pstate or "-",
            f"{gpu.pcie_generation}.0 x{gpu.pcie_width}" if gpu.pcie_generation else "-",
            _throttle(gpu),
        )
    return table


def _temperature(gpu: GpuSample) -> Text:
    if gpu.temperature_c is None:
        return Text("-")
    profile = profile_of(gpu.name)
    style = ""
    if profile is not None:
        # Ten degrees below the slowdown is where a passively cooled card wants more air.
        if gpu.temperature_c >= profile.slowdown_c - 10:
            style = "yellow"
        if gpu.temperature_c >= profile.slowdown_c - 3:
            style = "bold red"
    return Text(f"{gpu.temperature_c:.0f} C", style=style)


def _throttle(gpu: GpuSample) -> Text:
    if gpu.throttle is None:
        return Text("-")
    alarming = ALARMING.intersection(gpu.throttle)
    return Text(" ".join(gpu.throttle) or "nothing", style="bold red" if alarming else "dim")


def _machine_table(sample: Sample, pss: int | None) -> Table:
    host = sample.host
    grid = Table.grid(padding=(0, 2, 0, 0))
    machine = [f"CPU {host.cpu_percent:.0f} %" if host.cpu_percent is not None else "CPU -"]
    machine.append(f"load {host.load_1m:.2f} on {host.cores} cores")
    machine.append(f"RAM {_gib(host.ram_used)} of {_gib(host.ram_total)} GiB")
    machine.append(f"swap {_gib(host.swap_used)} GiB")
    if sample.shm_used is not None:
        machine.append(f"/dev/shm {_gib(sample.shm_used)} GiB")
    if host.disk_free is not None:
        machine.append(f"disk {_gib(host.disk_free)} GiB free")
    grid.add_row(Text("machine", style="dim"), "  ".join(machine))
    if sample.tree is not None:
        grid.add_row(Text("run", style="dim"), _tree_words(sample, pss))
    elif sample.hidden:
        grid.add_row(Text("run", style="dim"), Text(f"not visible: {sample.hidden}"))
    return grid


def _tree_words(sample: Sample, pss: int | None) -> str:
    tree = sample.tree
    if tree is None:
        return ""
    words = [f"{tree.processes} processes", f"RSS {_gib(tree.rss)} GiB"]
    if (size := pss if pss is not None else tree.pss) is not None:
        words.append(f"PSS {_gib(size)} GiB")
    if tree.cpu_percent is not None:
        words.append(f"CPU {tree.cpu_percent:.0f} %")
    return "  ".join(words)


def _spark(values: deque[float] | tuple[float, ...]) -> str:
    """Utilisation as a curve of 20 characters, each the mean of what falls on it."""
    shown = list(values)
    each = max(1, -(-len(shown) // 20))
    means = [
        sum(part) / len(part) for i in range(0, len(shown), each) if (part := shown[i : i + each])
    ]
    return "".join(_SPARKS[min(7, int(value / 100 * 8))] for value in means)


def _or_dash(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _pair(left: float | None, right: float | None) -> str:
    if left is None and right is None:
        return "-"
    return f"{_or_dash(left, '')} / {_or_dash(right, '')}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"
