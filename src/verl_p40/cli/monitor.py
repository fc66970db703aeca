"""``verl-p40 monitor``."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_p40.cli.output import console, print_json
from verl_p40.errors import UsageError
from verl_p40.monitor import tables, view
from verl_p40.monitor.sampler import Sampler
from verl_p40.monitor.stopping import stop_on_signals
from verl_p40.monitor.watch import watch
from verl_p40.stack import paths
from verl_p40.train.folder import RunFolder

EXAMPLES = (
    "Examples: verl-p40 monitor | verl-p40 monitor --once --json | "
    "verl-p40 monitor cpu-demo-1a2b3c --no-write | verl-p40 monitor --interval 5 --every 60"
)


def register(app: typer.Typer) -> None:
    """Add ``monitor`` to ``app``."""
    app.command(epilog=EXAMPLES)(monitor)


def monitor(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Name or path of a run folder. Default: whichever run is active, one after the "
            "other.",
            show_default=False,
        ),
    ] = None,
    runs_dir: Annotated[
        Path | None, typer.Option(help="Where run folders are. Default: $VERL_P40_RUNS, or runs.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two samples.")
    ] = 1.0,
    every: Annotated[
        float,
        typer.Option(
            min=0.1, max=86400, help="Seconds between two lines where there is no terminal."
        ),
    ] = 10.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show one sample, write nothing, end.")
    ] = False,
    no_write: Annotated[
        bool, typer.Option("--no-write", help="Only show; write nothing into run folders.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON object a sample, a line each (--once: one)."),
    ] = False,
) -> None:
    """Sample GPUs, machine and processes into the active run's folder, and show them.

    Writes gpu.csv and host.csv (docs/monitor.md); without a GPU, host.csv alone. Ctrl-C or SIGTERM
    ends it with exit code 0.
    """
    home = runs_dir.expanduser().resolve() if runs_dir else paths.runs_home()
    only = _named(run, home) if run else None
    if only is not None:
        home = only.path.parent
    if once:
        _once(home, only, as_json)
        return
    out = console()
    with stop_on_signals() as stop:
        shown = view.choose(out, every=every, as_json=as_json)
        try:
            watch(home, only, shown, stop, interval=interval, write=not no_write)
        except BrokenPipeError:
            # `verl-p40 monitor --json | head`: whoever read has had enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            shown.close()


def _once(home: Path, only: RunFolder | None, as_json: bool) -> None:
    with stop_on_signals() as stop:
        notes: list[str] = []
        sampler = Sampler(home, only, notes.append, stop.is_asked)
        try:
            # Rates (CPU) need two looks.
            sampler.take()
            stop.wait(0.5)
            sample = sampler.take()
        finally:
            sampler.close()
    if as_json:
        print_json(tables.document(sample))
        return
    out = console()
    for note in notes:
        out.print(note, markup=False)
    out.print(view.screen(sample))


def _named(run: str, home: Path) -> RunFolder:
    """The folder of a run by its name or path.

    Raises:
        UsageError: there is none, with names that are close.
    """
    given = Path(run).expanduser()
    folder = RunFolder((given if given.name != run else home / run).resolve())
    if folder.path.is_dir():
        return folder
    if given.name == run and given.is_dir():
        return RunFolder(given.resolve())
    names = sorted(path.name for path in home.iterdir() if path.is_dir()) if home.is_dir() else []
    close = difflib.get_close_matches(folder.name, names, n=3, cutoff=0.4)
    raise UsageError(
        f"there is no run folder {folder.path}",
        fix=f"did you mean {', '.join(close)}?" if close else "leave it out to follow any run",
    )
