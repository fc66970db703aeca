"""How every command speaks: a table for people, JSON for programs, one line for an error."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from verl_p40.errors import VerlP40Error

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output instead.")
]


def console() -> Console:
    """Standard output for people. rich honours NO_COLOR, TERM=dumb and a pipe by itself."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Write ``document`` as JSON: the only thing on standard output of a ``--json`` call."""
    json.dump(document, sys.stdout, indent=2, sort_keys=False, default=str)
    sys.stdout.write("\n")


def print_error(error: VerlP40Error) -> None:
    out = stderr_console()
    out.print(f"[bold red]error:[/] {escape(error.message)}")
    if error.fix:
        out.print(f"  [bold]fix:[/] {escape(error.fix)}")
