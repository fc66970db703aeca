"""``verl-p40 wheel``: vLLM for compute capability 6.1, compiled."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.stack import env, pins
from verl_p40.stack.progress import ConsoleReport
from verl_p40.wheel import build as building
from verl_p40.wheel.build import Built

_SLOWEST = 8


def register(parent: typer.Typer) -> None:
    """Add the command to ``parent``."""
    parent.command("wheel", epilog="Example: verl-p40 wheel --jobs 2 --out dist")(wheel)


def wheel(
    arch: Annotated[
        str,
        typer.Option(
            "--arch", help="Compute capabilities to compile for, such as 6.1 or 6.0;6.1+PTX."
        ),
    ] = "",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the wheel goes.")] = Path(
        "dist"
    ),
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Compilers at a time; by default cores and memory decide."
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            metavar="FILE",
            help="Interpreter whose torch it is built against; by default the training stack's, "
            "which is installed first.",
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="DIR", help="Folder that is kept for going on later."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Build vLLM's wheel from the pinned sdist and the patch queue, for a P40.

    Needs CUDA 11.8 (CUDA_HOME, or nvcc on PATH), g++ 9 to 11 (CUDAHOSTCXX), 3 GiB of memory a job
    and about half an hour on two cores. Interrupted, it goes on where it was.
    """

    def interpreter() -> Path:
        if python is not None:
            return python
        with ConsoleReport() as report:
            return env.ensure(report=report).python

    archs = arch or pins.load().arch.torch_cuda_arch_list
    request = building.make_request(interpreter, archs, out, work=work, jobs=jobs)
    # A SIGTERM ends the compilers too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _Steps(stderr_console()) as steps:
        built = building.build(request, on_stage=steps.stage, on_step=steps.step)
    if as_json:
        print_json(built.as_json())
    else:
        _show(console(), built)


class _Steps:
    """A bar on a terminal; elsewhere a line a file."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._bar = Progress(
            TextColumn("compiling"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=out,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        self._out.print(text, markup=False)

    def step(self, done: int, total: int, what: str) -> None:
        if self._out.is_terminal:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total, description=what)
        else:
            self._out.print(f"{done}/{total} {what}", markup=False)


def _show(out: Console, built: Built) -> None:
    out.print(f"{built.wheel}: {built.bytes / 1e6:.1f} MB, built against torch {built.torch}")
    for name, targets in built.architectures.items():
        held = ", ".join(f"{target} in {count} modules" for target, count in targets.items())
        out.print(f"  {name}: {held}", markup=False)
    if built.compiled:
        out.print(
            f"{len(built.compiled)} files compiled in {built.seconds / 60:.1f} minutes, "
            f"{built.warnings} warnings; the longest:"
        )
        for name, seconds in list(built.compiled.items())[:_SLOWEST]:
            out.print(f"  {seconds:6.0f} s  {name}", markup=False)
