"""``verl-p40 diagnose``: from a log to the one thing to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_p40.cli.diagnose_view import show, to_json
from verl_p40.cli.output import JsonFlag, console, print_json
from verl_p40.errors import ExitCode


def register(parent: typer.Typer) -> None:
    """Add the command to ``parent``."""
    parent.command(
        "diagnose",
        epilog="Examples: verl-p40 diagnose train.log  ·  verl-p40 diagnose runs/p40-ppo  ·  "
        "docker compose logs train | verl-p40 diagnose -",
    )(diagnose)


def diagnose(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[LOG | RUN | -]",
            help="A log file (plain, .gz, UTF-16), a run folder or its name, or - for standard "
            "input. The newest run when left out.",
        ),
    ] = None,
    runs: Annotated[
        Path, typer.Option("--runs-dir", help="Where the run folders are.", envvar="VERL_P40_RUNS")
    ] = Path("runs"),
    as_json: JsonFlag = False,
) -> int:
    """Find why a run, build, install or container failed, from its log.

    Of a run folder with several attempts the last failed one is read.
    Prints the root cause, the very lines that show it, how sure that is and why, and what to do.
    Exit code 0: a cause was found; 1: nothing known was found; 5: the log cannot be read.
    """
    from verl_p40.diagnose import advice, diagnose_chunks
    from verl_p40.diagnose.inputs import find

    source = find(target, runs=runs)
    with source.chunks() as chunks:
        diagnosis = diagnose_chunks(
            chunks, first_line=source.first_line, advise=advice.for_run(source.run)
        )
    if as_json:
        print_json(to_json(diagnosis, source))
    else:
        show(console(), diagnosis, source)
    return ExitCode.OK if diagnosis.causes else ExitCode.FOUND
