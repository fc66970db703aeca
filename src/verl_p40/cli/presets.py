"""``verl-p40 presets``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from verl_p40.cli.output import JsonFlag, console, print_json
from verl_p40.errors import ExitCode

presets = typer.Typer(
    help="List the presets and show one.",
    epilog="Example: verl-p40 presets show p40-ppo",
    invoke_without_command=True,
)


def register(app: typer.Typer) -> None:
    """Add ``presets`` to ``app``."""
    app.add_typer(presets, name="presets")


@presets.callback()
def list_presets(context: typer.Context, as_json: JsonFlag = False) -> int:
    """List the presets: what each is for, and on what it has really been run."""
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    from verl_p40.train import catalog

    found = catalog.all_presets()
    if as_json:
        print_json([_document(preset) for preset in found])
        return ExitCode.OK
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("preset", "what it is", "model", "shown by"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "preset")
    for preset in found:
        about = preset.about
        table.add_row(preset.name, escape(about.description), about.model, about.shown.value)
    out = console()
    out.print(table)
    out.print("\n`verl-p40 presets show NAME` prints one; `verl-p40 train NAME` trains it.")
    return ExitCode.OK


@presets.command(epilog="Example: verl-p40 presets show p40-recipe")
def show(
    name: Annotated[str, typer.Argument(help="A preset name, or a .yaml file of your own.")],
    as_json: JsonFlag = False,
) -> int:
    """Print a preset's file, and the environment variables that it exports."""
    from verl_p40.train import catalog

    preset = catalog.load(name)
    if as_json:
        print_json({**_document(preset), "text": preset.text})
        return ExitCode.OK
    out = console()
    out.print(f"[bold]{preset.name}[/]: {escape(preset.about.description)}")
    out.print(f"shown by: {preset.about.shown.value}\n")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("variable", "value", "why"):
        table.add_column(heading, overflow="fold")
    for variable, setting in preset.about.env.items():
        style = "dim" if setting.noop else ""
        table.add_row(variable, escape(setting.value), escape(setting.why), style=style)
    out.print(table)
    out.print()
    typer.echo(preset.text, nl=False)
    return ExitCode.OK


def _document(preset: Any) -> dict[str, Any]:
    return {
        "name": preset.name,
        "path": str(preset.path),
        **preset.about.model_dump(mode="json"),
    }
