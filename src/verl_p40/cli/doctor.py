"""``verl-p40 doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from verl_p40.doctor import Check

EXAMPLES = (
    "Examples: verl-p40 doctor | verl-p40 doctor --only gpu,nvidia -v | "
    "verl-p40 doctor --script train.sh | verl-p40 doctor --record host.yaml"
)


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to ``app``."""
    app.command(epilog=EXAMPLES)(doctor)


def doctor(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHECK,...",
            help="Only these checks or groups (--list names them).",
            show_default=False,
        ),
    ] = None,
    script: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A start script to look for settings in. Default: those here.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="The model: a folder or a hub name. Default: that of p40-ppo.", show_default=False
        ),
    ] = "",
    data: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A parquet file to check. Default: those that are prepared.",
            show_default=False,
        ),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Only what takes no Python to start and no network.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Also write what was found out, without serial numbers and names, "
            "to attach to a report.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Look at a recorded machine instead of this one.", show_default=False),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the checks and stop.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Details and times too.")
    ] = False,
    as_json: JsonFlag = False,
) -> int:
    """Check host, card, driver, Docker, stack, settings, model and data: one line each, in seconds.

    Each line that is not ok has what to do beneath it. Exit code 0: nothing worse than a note;
    1: a failure; 11: a warning and no failure.
    """
    from verl_p40.cli import doctor_view
    from verl_p40.doctor import State, recording, run_checks, select
    from verl_p40.doctor.machine import Live, Machine, Subject
    from verl_p40.doctor.model import worst

    words = [word for text in only or [] for word in text.split(",") if word]
    if replay is not None and (record is not None or script or model or data):
        raise UsageError("--replay looks at nothing but the recording", fix="leave the others out")
    machine: Machine
    if replay is not None:
        machine = recording.load(replay)
    else:
        subject = Subject(tuple(map(str, script or [])), model, tuple(map(str, data or [])))
        machine = Live(subject)
    recorder = recording.Recorder(machine) if record is not None else None
    chosen = [c for c in select(words, machine) if c.fast or not fast]
    if listing:
        return _list(chosen, as_json)
    out, reports = console(), []
    for report in run_checks(chosen, recorder or machine):
        reports.append(report)
        if not as_json:
            doctor_view.show(out, report, verbose, live=machine.live)
    if recorder is not None and record is not None:
        recorder.write(record)
        stderr_console().print(f"recorded in {record}: read it before you publish it", markup=False)
    if as_json:
        print_json(doctor_view.to_json(reports))
    else:
        doctor_view.summary(out, reports)
    found = worst([report.outcome.state for report in reports])
    return {State.FAILURE: ExitCode.FOUND, State.WARNING: ExitCode.WARNING}.get(found, ExitCode.OK)


def _list(chosen: Sequence[Check], as_json: bool) -> int:
    if as_json:
        print_json([{"id": c.id, "group": c.group, "title": c.title} for c in chosen])
        return ExitCode.OK
    out = console()
    for group in dict.fromkeys(check.group for check in chosen):
        out.print(f"[bold]{group}[/]")
        for check in chosen:
            if check.group == group:
                out.print(f"  {check.id:<18} {check.title}", markup=False)
    return ExitCode.OK
