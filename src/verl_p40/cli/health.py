"""``verl-p40 health``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from verl_p40.cli.output import JsonFlag, console, print_json
from verl_p40.errors import ExitCode, UsageError
from verl_p40.health import CHECKS, LimitError
from verl_p40.stack import paths


class Service(str, Enum):
    """What can be asked about."""

    TRAIN = "train"
    MONITOR = "monitor"


def register(app: typer.Typer) -> None:
    """Add ``health`` to ``app``."""
    app.command(
        epilog="Examples: verl-p40 health train | verl-p40 health monitor --runs-dir /data/runs"
    )(health)


def health(
    service: Annotated[Service, typer.Argument(show_default=False, help="What to ask about.")],
    runs_dir: Annotated[
        Path | None, typer.Option(help="Where run folders are. Default: $VERL_P40_RUNS, or runs.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Say in one line whether training, or the monitor, gets on: exit code 0, or 1 if not.

    Containers ask `python -m verl_p40.health`, which says the same and starts faster.
    """
    try:
        found = CHECKS[service.value](str(runs_dir or paths.runs_home()))
    except LimitError as error:
        raise UsageError(str(error)) from error
    if as_json:
        print_json({"service": service.value, "healthy": found.ok, "why": found.why, **found.facts})
    else:
        console().print(found.line(), markup=False)
    return ExitCode.OK if found.ok else ExitCode.FOUND
