"""Entry point of ``verl-p40``: puts the command groups together and maps errors to exit codes."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import click
import typer

from verl_p40 import __version__
from verl_p40.cli.output import print_error
from verl_p40.errors import ExitCode, VerlP40Error

app = typer.Typer(
    name="verl-p40",
    help="verl (PPO, GRPO) on a Tesla P40 and other pre-Ampere NVIDIA cards, and on the CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: verl-p40 train cpu-demo",
)

GROUPS = (
    "train",
    "export",
    "plan",
    "doctor",
    "diagnose",
    "monitor",
    "health",
    "smoke",
    "data",
    "stack",
    "patches",
    "audit",
    "kernels",
    "wheel",
    "presets",
    "image",
)
"""Modules of ``verl_p40.cli`` that each expose ``register(app)``, in the order of ``--help``."""


def _version(value: bool) -> None:
    if value:
        typer.echo(f"verl-p40 {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


for _group in GROUPS:
    importlib.import_module(f"verl_p40.cli.{_group}").register(app)


def run(argv: list[str] | None = None) -> None:
    """Run the command and leave the process with a documented exit code."""
    try:
        result = app(args=argv, standalone_mode=False)
        sys.exit(result if isinstance(result, int) else ExitCode.OK)
    except VerlP40Error as error:
        print_error(error)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)


if __name__ == "__main__":
    run()
