"""``verl-p40 export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.errors import ExitCode

EXAMPLES = (
    "Examples: verl-p40 export cpu-demo-1a2b3c my-model | "
    "verl-p40 export runs/p40-ppo-1a2b3c my-model --step 50 --dtype float16"
)


def register(app: typer.Typer) -> None:
    """Add ``export`` to ``app``."""
    app.command(epilog=EXAMPLES)(export)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the name of one.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write, which must not exist yet.")
    ],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Which checkpoint. Default: the newest.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, float16 or bfloat16. Default: that of the weights.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="What to ask the exported model, to see that it answers.")
    ] = "What is 2 + 3?",
    runs_dir: Annotated[
        Path | None, typer.Option(help="Where run folders are. Default: $VERL_P40_RUNS, or runs.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Make a Hugging Face model of a run's checkpoint: safetensors, tokenizer, generation config.

    The FSDP shards are merged, a LoRA adapter is added to its weights, and the result is loaded
    with transformers and asked something before it gets its name.
    """
    from verl_p40.stack import paths
    from verl_p40.train import export as exporting

    found = exporting.find_run(run, runs_dir or paths.runs_home())
    with stderr_console().status("") as status:
        done = exporting.export(
            found, out, step=step, dtype=dtype, prompt=prompt, say=status.update
        )
    document = done.document()
    if as_json:
        print_json(document)
        return ExitCode.OK
    shown = console()
    shown.print(
        f"{escape(document['out'])}: step {document['step']}, "
        f"{document['parameters']:,} parameters, {document['dtype']}, "
        f"{document['bytes'] / 1e6:.1f} MB",
        soft_wrap=True,
    )
    shown.print(escape(f"asked {prompt!r}, it answers {document['answer']!r}"), soft_wrap=True)
    return ExitCode.OK
