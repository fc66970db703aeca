"""``verl-p40 plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.errors import ExitCode

EXAMPLES = (
    "Examples: verl-p40 plan p40-ppo | "
    "verl-p40 plan p40-ppo --model Qwen/Qwen2.5-1.5B-Instruct | "
    "verl-p40 plan p40-ppo actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 --json | "
    "verl-p40 plan --model my-model/ --gpu-memory 24451"
)


def register(app: typer.Typer) -> None:
    """Add ``plan`` to ``app``."""
    app.command(epilog=EXAMPLES)(plan)


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET] [KEY=VALUE]...",
            help="A preset (default p40-ppo) or a .yaml file of your own, then any verl setting.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a model's config.json, or a known id, for policy and critic. "
            "Default: the preset's."
        ),
    ] = None,
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            metavar="MIB", min=1, help="Usable memory of a card. Default: a P40's with ECC on."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Say how much memory each phase of a run will need, whether it fits, and what would.

    Nothing is loaded or downloaded. Exit code 1: it does not fit.
    """
    from verl_p40.plan import fit, shapes, view
    from verl_p40.stack.env import adopted
    from verl_p40.train.compose import Variants
    from verl_p40.train.runspec import split_arguments
    from verl_p40.train.source import config_folder

    preset, overrides = split_arguments(arguments or [])
    preset = preset or "p40-ppo"
    shape = shapes.find(model) if model else None
    card = gpu_memory * fit.MIB if gpu_memory else fit.default_card()
    folder = config_folder(adopted(), lambda text: stderr_console().print(text, markup=False))

    composed = Variants(preset, fit.later_wins(overrides), folder)
    planned = fit.make_plan(composed(()), card, shape)
    found = fit.changes(planned, composed, shape)
    if as_json:
        print_json({"preset": preset, **view.document(planned, found)})
    else:
        view.show(planned, found, console())
    return ExitCode.OK if planned.fits or planned.setup.device == "cpu" else ExitCode.FOUND
