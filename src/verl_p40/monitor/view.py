"""What a user sees: a live table on a terminal, a line now and then in a log, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl_p40.hardware.p40 import profile_of
from verl_p40.hardware.sample import ALARMING, GpuSample
from verl_p40.monitor import tables
from verl_p40.monitor.sample import Sample

_GIB = 1024**3
_SPARKS = "▁▂▃▄▅▆▇█"
_HISTORY = 60
_BAR = 20
_SILENT = ["does not answer"]


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
    sample: Sample, history: Mapping[int, Sequence[float]] | None = None, pss: int | None = None
) -> RenderableType:
    """A sample as a table.

    Args:
        history: utilisation of each GPU in the samples before, by index.
        pss: the run's PSS in bytes where it was last read.
    """
    parts: list[RenderableType] = [_heading(sample)]
    parts += [_gpu_block(gpu, (history or {}).get(gpu.index, ())) for gpu in sample.gpus]
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
    if held_back := _held_back(gpu):
        words.append(f"[{' '.join(held_back)}]")
    return words or _SILENT


def _gpu_block(gpu: GpuSample, history: Sequence[float]) -> RenderableType:
    """A GPU in six or seven lines of less than 80 characters."""
    head = Text(f"GPU {gpu.index}  ", style="dim")
    head.append(gpu.name, style="bold")
    for part in (
        gpu.pstate,
        f"memory at {gpu.memory_clock_mhz:.0f} MHz" if gpu.memory_clock_mhz is not None else None,
        f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}" if gpu.pcie_generation else None,
    ):
        head.append(f"  {part}" if part else "", style="dim")
    if _gpu_words(gpu) == _SILENT:
        head.append("  does not answer", style="bold red")
        return head
    profile = profile_of(gpu.name)
    slowdown = float(profile.slowdown_c) if profile else None
    fastest = float(profile.sm_clock_max_mhz) if profile else None
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", min_width=6)
    grid.add_column(min_width=_BAR)
    grid.add_column(no_wrap=True)
    rows = (
        ("util", gpu.utilization_percent, 100.0, "%", Text(_spark(history), style="green")),
        ("memory", gpu.memory_used_mib, gpu.memory_total_mib, "MiB", _process_memory(gpu)),
        ("power", gpu.power_w, gpu.power_limit_w, "W", Text("")),
        ("heat", gpu.temperature_c, slowdown, "C", Text("")),
        ("clocks", gpu.sm_clock_mhz, fastest, "MHz", Text("")),
    )
    for label, value, limit, unit, more in rows:
        if value is None:
            grid.add_row(label, "", Text("not reported", style="dim"))
            continue
        bar: RenderableType = ""
        if limit:
            bar = ProgressBar(total=limit, completed=min(value, limit), width=_BAR)
        of = f" of {limit:.0f}" if limit and label != "util" else ""
        text = Text(f"{value:.0f}{of} {unit}", style=_heat(gpu) if label == "heat" else "")
        grid.add_row(label, bar, Text.assemble(text, "  ", more) if more else text)
    held_back = _held_back(gpu)
    if not held_back:
        return Group(head, grid)
    alarming = ALARMING.intersection(held_back)
    by = Text("slowed  ", style="dim").append(
        "by " + " ".join(held_back), style="bold red" if alarming else ""
    )
    return Group(head, grid, by)


def _process_memory(gpu: GpuSample) -> Text:
    if not gpu.processes:
        return Text("")
    size = gpu.process_memory_mib
    held = "" if size is None else f" holds {size} MiB"
    if len(gpu.processes) > 1:
        held = held.replace("holds", "hold")
    return Text(f"{_count(len(gpu.processes), 'process')}{held}", style="dim")


def _heat(gpu: GpuSample) -> str:
    profile = profile_of(gpu.name)
    if profile is None or gpu.temperature_c is None:
        return ""
    # Ten degrees below the slowdown is where a passively cooled card wants more air.
    if gpu.temperature_c >= profile.slowdown_c - 3:
        return "bold red"
    return "yellow" if gpu.temperature_c >= profile.slowdown_c - 10 else ""


def _held_back(gpu: GpuSample) -> list[str]:
    """What holds the clocks back, but for having nothing to do."""
    return [word for word in gpu.throttle or () if word != "gpu_idle"]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}es"


def _machine_table(sample: Sample, pss: int | None) -> Table:
    host = sample.host
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", width=7)
    cpu = f"CPU {host.cpu_percent:.0f} %" if host.cpu_percent is not None else "CPU -"
    memory = f"RAM {_gib(host.ram_used)} of {_gib(host.ram_total)} GiB"
    grid.add_row(
        "machine",
        f"{cpu} of {host.cores} cores, load {host.load_1m:.2f}  {memory}  "
        f"swap {_gib(host.swap_used)} GiB",
    )
    room = []
    if sample.shm_used is not None:
        room.append(f"/dev/shm {_gib(sample.shm_used)} GiB used")
    if host.disk_free is not None:
        room.append(f"disk {_gib(host.disk_free)} GiB free")
    if room:
        grid.add_row("", "  ".join(room))
    if sample.tree is not None:
        grid.add_row("run", _tree_words(sample, pss))
    elif sample.hidden:
        grid.add_row("run", Text(f"not visible: {sample.hidden}"))
    return grid


def _tree_words(sample: Sample, pss: int | None) -> str:
    tree = sample.tree
    if tree is None:
        return ""
    words = [_count(tree.processes, "process"), f"RSS {_gib(tree.rss)} GiB"]
    if (size := pss if pss is not None else tree.pss) is not None:
        words.append(f"PSS {_gib(size)} GiB")
    if tree.cpu_percent is not None:
        words.append(f"CPU {tree.cpu_percent:.0f} %")
    return "  ".join(words)


def _spark(values: Sequence[float]) -> str:
    """Utilisation as a curve of 20 characters, each the mean of what falls on it."""
    shown = list(values)
    each = max(1, -(-len(shown) // 20))
    means = [
        sum(part) / len(part) for i in range(0, len(shown), each) if (part := shown[i : i + each])
    ]
    return "".join(_SPARKS[min(7, int(value / 100 * 8))] for value in means)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"
