"""``verl-p40 data``: the demo's files, GSM8K as verl's parquet, and a check of any parquet."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import click
import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.data import models, prepare
from verl_p40.data.child import Progress as Tell
from verl_p40.data.child import silent
from verl_p40.data.prepare import DEFAULT_SEED, Prepared
from verl_p40.errors import DataError, ExitCode, UsageError
from verl_p40.stack import env as stack_env
from verl_p40.stack.env import StackEnv
from verl_p40.stack.progress import ConsoleReport, Silent

Source = Literal["hf", "modelscope"]

data = typer.Typer(
    help="Make the data sets and the demo's model.",
    no_args_is_help=True,
    epilog="Example: verl-p40 data demo",
)

OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder to make, with train.parquet and test.parquet."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Make it again even if it is there and whole.")
]


def register(app: typer.Typer) -> None:
    """Add this group to ``app``."""
    app.add_typer(data, name="data")


def _stack(json: bool) -> StackEnv:
    return stack_env.ensure("cpu", report=Silent() if json else ConsoleReport())


class _Bar:
    """A bar on a terminal; elsewhere one plain line for each new thing that is done."""

    def __init__(self, json: bool) -> None:
        self._quiet = json
        self._last = ""
        self._console = stderr_console()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Tell:
        if self._quiet:
            return silent
        if self._console.is_terminal:
            self._bar.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def _tell(self, text: str, fraction: float | None) -> None:
        if self._console.is_terminal:
            total = None if fraction is None else 1.0
            self._bar.update(self._task, description=text, total=total, completed=fraction or 0)
            return
        stage = text.split(",")[0]
        if stage != self._last:
            self._last = stage
            self._console.print(escape(stage))


@data.command(
    "demo",
    epilog="Example: verl-p40 data demo --seed 2 --out data/demo-2",
)
def demo(
    out: OutOption = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="The same seed gives the same files.")
    ] = DEFAULT_SEED,
    force: ForceOption = False,
    json: JsonFlag = False,
) -> None:
    """Make arithmetic word problems in GSM8K's form and a small Qwen2 to train on them.

    Everything is made on this machine in about a minute: no download. The model can calculate
    and answer in GSM8K's format, but mostly adds whatever the story says; PPO teaches it to
    read. `verl-p40 train cpu-demo` does this by itself.
    """
    env = _stack(json)
    with _Bar(json) as tell:
        made = prepare.demo(stack_env=env, out=out, seed=seed, force=force, progress=tell)
    if json:
        print_json(made.as_json())
        return
    _print(made)
    accuracy = made.facts["greedy_accuracy"]
    console().print(
        f"model: {escape(str(made.model))} ({made.facts['parameters']:,} parameters, "
        f"greedy accuracy {accuracy:.2f} on the test problems)"
    )


@data.command(
    "gsm8k",
    epilog="Example: verl-p40 data gsm8k --local ~/grade-school-math",
)
def gsm8k(
    local: Annotated[
        Path | None,
        typer.Option(
            "--local",
            help="A copy on this machine: jsonl files, the hub's parquet, or save_to_disk.",
        ),
    ] = None,
    source: Annotated[
        Source,
        typer.Option(
            "--source",
            click_type=click.Choice(get_args(Source)),
            help="Where to download it: Hugging Face (HF_ENDPOINT, HF_HOME) or ModelScope.",
        ),
    ] = "hf",
    out: OutOption = None,
    any_count: Annotated[
        bool,
        typer.Option("--any-count", help="Take a part of GSM8K, not only all 7473 + 1319 rows."),
    ] = False,
    force: ForceOption = False,
    json: JsonFlag = False,
) -> None:
    """Make verl's parquet files of GSM8K, with every answer checked by verl's own scorer."""
    env = _stack(json)
    with _Bar(json) as tell:
        made = prepare.gsm8k(
            stack_env=env,
            out=out,
            local=local,
            source=source,
            any_count=any_count,
            force=force,
            progress=tell,
        )
    if json:
        print_json(made.as_json())
        return
    _print(made)


@data.command("model", epilog="Example: verl-p40 data model Qwen/Qwen2.5-0.5B-Instruct")
def model(
    name: Annotated[str, typer.Argument(help="The model's name on the hub.", show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Download a model of the Hugging Face hub (HF_ENDPOINT, HF_HOME), or find it.

    `verl-p40 train` does this by itself. A folder NAME under $VERL_P40_MODELS (models) comes first:
    put a copy there where there is no network.
    """
    if not models.is_hub_name(name):
        raise UsageError(
            f"{name!r} is no name of a model on the hub", fix="verl-p40 data model --help"
        )
    found = models.find(name)
    if found is None:
        env = _stack(json)
        with _Bar(json) as tell:
            found = models.ensure(name, stack_env=env, progress=tell)
    if json:
        print_json({"name": name, "folder": str(found.folder), "source": found.source})
        return
    word = "downloaded" if found.source == "downloaded" else "already there"
    console().print(f"{word}: {escape(str(found.folder))}")


@data.command(
    "check",
    epilog="Example: verl-p40 data check my.parquet --model models/Qwen2.5-0.5B "
    "--max-prompt-length 256",
)
def check(
    path: Annotated[Path, typer.Argument(help="A parquet file to train on.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Count prompts in this model's tokens.")
    ] = None,
    max_prompt_length: Annotated[
        int | None, typer.Option("--max-prompt-length", min=1, help="Tokens; needs --model.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check that verl can train on a parquet file: columns, types, every row, prompt lengths."""
    if max_prompt_length is not None and model is None:
        raise UsageError("--max-prompt-length counts tokens and needs --model", fix="add --model")
    args = [str(path), "--json"]
    args += ["--model", model] if model else []
    args += ["--max-prompt-length", str(max_prompt_length)] if max_prompt_length else []
    finished = _stack(json).run_module("verl_p40.data.schema", args, capture=True)
    report = _last_json(finished.stdout, finished.stderr)
    if json:
        print_json(report)
        sys.exit(ExitCode.OK if report["ok"] else ExitCode.DATA)
    if not report["ok"]:
        raise DataError(report["message"], fix=report["fix"])
    out = console()
    out.print(f"{escape(str(path))}: {report['rows']} rows")
    for name, rows in report["data_sources"].items():
        out.print(f"  data_source {escape(name)}: {rows} rows")
    if "longest_prompt" in report:
        out.print(
            f"  longest prompt: {report['longest_prompt']} tokens (row {report['longest_row']})"
        )
    if report.get("over_limit"):
        out.print(
            f"  {report['over_limit']} prompts are longer than {max_prompt_length} tokens: set "
            "data.filter_overlong_prompts=true to leave them out"
        )


def _last_json(stdout: str, stderr: str) -> dict[str, Any]:
    for line in reversed(stdout.splitlines()):
        if line.startswith("{"):
            return dict(jsonlib.loads(line))
    words = (stderr.strip().splitlines() or ["no output"])[-1]
    raise DataError(f"the check did not run: {words[:300]}")


def _print(made: Prepared) -> None:
    out = console()
    rows = made.facts["rows"]
    word = "already there" if made.reused else "made"
    out.print(f"{word}: {escape(str(made.folder))}")
    out.print(f"train: {escape(str(made.train))} ({rows['train']} rows)")
    out.print(f"test:  {escape(str(made.test))} ({rows['test']} rows)")
