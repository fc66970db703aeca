"""``verl-p40 train``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.errors import ExitCode

EXAMPLES = (
    "Examples: verl-p40 train cpu-demo | "
    "verl-p40 train p40-ppo data.train_batch_size=16 trainer.total_epochs=1 | "
    "verl-p40 train cpu-demo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 | "
    "verl-p40 train --run cpu-demo-1a2b3c trainer.total_training_steps=120"
)


def register(app: typer.Typer) -> None:
    """Add ``train`` to ``app``."""
    app.command(epilog=EXAMPLES)(train)


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET] [KEY=VALUE]...",
            help="A preset (`verl-p40 presets`; default cpu-demo) or a .yaml file of your own, "
            "then any verl setting: key=value, +key=value, ++key=value, ~key.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Name of the run folder. Default: the preset and a digest of its config."
        ),
    ] = None,
    runs_dir: Annotated[
        Path | None, typer.Option(help="Where run folders are. Default: $VERL_P40_RUNS, or runs.")
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Start another run instead of going on with this one.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved config and the command; start nothing."),
    ] = False,
    tripwire: Annotated[
        bool,
        typer.Option("--tripwire", help="Stop at the first half-precision tensor (slower)."),
    ] = False,
    retries: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How often to try again, from the newest checkpoint, without getting further; 0 "
            "stops at the first failure. Default: $VERL_P40_RETRIES, or 3.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Train with verl, and go on where an interrupted run of the same command stopped.

    The same command always means the same run folder. Kill it, run it again: it resumes from
    its last checkpoint.
    """
    # Here, so that `verl-p40 --help` does not wait for hydra.
    from verl_p40.train import launch
    from verl_p40.train.runspec import Request, split_arguments
    from verl_p40.train.view import PlainView, choose

    preset, overrides = split_arguments(arguments or [])
    request = Request(preset, overrides, run, runs_dir, new, tripwire, retries)
    if dry_run:
        _, document = launch.dry_run(request, _say)
        print_json(document) if as_json else _print_dry_run(document)
        return ExitCode.OK
    view = PlainView(stderr_console()) if as_json else choose(console())
    try:
        summary = launch.train(request, view)
    finally:
        view.close()
    if as_json:
        print_json(summary.document())
    else:
        _print_summary(summary.document(), console())
    interrupted = summary.outcome is not None and summary.outcome.status == "interrupted"
    return ExitCode.INTERRUPTED if interrupted else ExitCode.OK


def _say(text: str) -> None:
    stderr_console().print(text, markup=False)


def _print_dry_run(document: dict[str, Any]) -> None:
    """The config as YAML, with what would be run in comments: the output is a valid config."""
    from verl_p40.train.compose import to_yaml

    action = {
        "start": "would start",
        "restart": "would start over (no checkpoint) in",
        "resume": f"would resume from step {document['from_step']} in",
        "finished": "is finished:",
    }[document["action"]]
    typer.echo(f"# preset {document['preset']}: {action} {document['run']}")
    for warning in document["warnings"]:
        typer.echo(f"# warning: {warning}")
    for note in document["notes"]:
        typer.echo(f"# {note}")
    typer.echo("# command:")
    for name, value in document["env"].items():
        typer.echo(f"#   {name}={shlex.quote(value)} \\")
    typer.echo(f"#   {shlex.join(document['command'])}")
    typer.echo(to_yaml(document["config"]), nl=False)


def _print_summary(document: dict[str, Any], out: Console) -> None:
    from verl_p40.train.view import clock

    def line(name: str, text: str) -> None:
        out.print(f"[bold]{name:<10}[/] {escape(text)}", soft_wrap=True)

    def change(value: dict[str, float]) -> str:
        return f"{value['from']:.3f} -> {value['to']:.3f}"

    out.print()
    of = f" of {document['total_steps']}" if document["total_steps"] else ""
    took = f", {clock(document['seconds'])}" if document["seconds"] else ""
    saved = ""
    if document["status"] == "interrupted":
        at = document["checkpoint"]
        saved = "; no checkpoint" if at is None else f"; checkpoint at step {at}"
    line(document["status"], f"step {document['step']}{of}{took}{saved}")
    if document["reward"]:
        line("reward", change(document["reward"]) + "  (mean of the first and last 3 steps)")
    if document["accuracy"]:
        line("accuracy", change(document["accuracy"]) + "  (greedy, on the validation set)")
    if document["tripwire_operators"]:
        line("tripwire", f"{document['tripwire_operators']:,} operators, no half precision")
    if document["attempts"] > 1:
        line("attempts", str(document["attempts"]))
    for rung in document["ladder"]:
        line("ladder", f"{rung['what']}: {' '.join(rung['overrides'])}")
    line("run folder", document["run"])
    line("log", document["log"])
    if document["status"] in ("finished", "already finished"):
        line("extend", document["extend"])
        if document["status"] == "already finished":
            line("again", "add --new to start another run")
    else:
        line("resume", document["resume"])
