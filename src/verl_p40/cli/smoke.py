"""``verl-p40 smoke``."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.errors import ExitCode

if TYPE_CHECKING:
    from verl_p40.smoke.model import Check, Result
    from verl_p40.smoke.run import Smoke

DeviceName = Literal["auto", "cpu", "cuda"]

EXAMPLES = (
    "Examples: verl-p40 smoke | verl-p40 smoke --fast | verl-p40 smoke --only triton --only matmul | "
    "verl-p40 smoke --skip vllm --report my-p40.json"
)
_STYLE = {"ok": "green", "skipped": "yellow", "failed": "bold red"}


def register(app: typer.Typer) -> None:
    """Add ``smoke`` to ``app``."""
    app.command(epilog=EXAMPLES)(smoke)


def smoke(
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="NAME",
            help="Only this check, and what it needs. May be given again.",
            show_default=False,
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            "--skip",
            metavar="NAME",
            help="Not this check, nor what needs it. May be given again.",
            show_default=False,
        ),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Only the cheap checks: no data, no training run.")
    ] = False,
    device: Annotated[
        DeviceName,
        typer.Option(
            click_type=click.Choice(["auto", "cpu", "cuda"]),
            help="auto: the GPU where there is one.",
        ),
    ] = "auto",
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the JSON report goes. Default: smoke/smoke-<UTC time>.json in the runs "
            "folder ($VERL_P40_RUNS, or runs).",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the checks; run none.")] = False,
    as_json: JsonFlag = False,
) -> int:
    """Check from cheap to dear that this machine can train: driver, torch, FP32, kernels, one step.

    Each check is one line: ok, skipped or failed, and why. A check that crashes or hangs fails, and
    the others run. Beside a training run the GPU is left alone. Exit code 1 when a check failed. The
    report holds no personal details: attach it to an issue.
    """
    # Here, so that `verl-p40 --help` does not wait for them.
    from verl_p40.smoke import catalog
    from verl_p40.smoke import report as reports
    from verl_p40.smoke.run import Smoke, choose_device
    from verl_p40.stack import env as stack_env
    from verl_p40.stack.progress import ConsoleReport

    checks = catalog.choose(only or (), skip or (), fast=fast)
    if list_:
        _list(checks, as_json)
        return ExitCode.OK
    began, started = time.monotonic(), datetime.now(timezone.utc)
    target = (report or reports.default_path(started)).expanduser().absolute()
    reports.reserve(target)
    where = choose_device(device)
    stack = stack_env.ensure("cpu" if where.device == "cpu" else "cu118", report=ConsoleReport())
    out = stderr_console() if as_json else console()
    on = "the GPU" if where.device == "cuda" else f"the CPU ({where.why})"
    out.print(escape(f"{len(checks)} checks on {on}"), soft_wrap=True)
    with _scratch() as scratch, _View(out) as view:
        smoke_test = Smoke(stack, where, scratch, view)
        results = smoke_test.run(checks)
        scrubber = reports.scrubber(stack, scratch)
        document = reports.build(
            results,
            device=where.device,
            stack=stack,
            seen=where.seen,
            started=started,
            seconds=time.monotonic() - began,
            scrubber=scrubber,
        )
        reports.write(target, document)
        logs = _keep_logs(smoke_test, target, scrubber.text)
    if as_json:
        print_json({"report": str(target), "logs": [str(log) for log in logs], **document})
    else:
        _conclude(document, target, logs, out)
    return ExitCode.FOUND if document["verdict"] == "failed" else ExitCode.OK


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the checks, gone afterwards; SIGTERM (`docker stop`) ends as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="vp40-smoke-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _keep_logs(smoke_test: Smoke, report: Path, scrub: Any) -> list[Path]:
    """What the failed checks printed, whole and scrubbed, beside the report."""
    kept = []
    for result in smoke_test.results.values():
        if result.verdict != "failed":
            continue
        target = report.with_name(f"{report.stem}-{result.check.name}.log")
        try:
            text = "".join(
                log.read_text(encoding="utf-8", errors="replace")
                for log in smoke_test.logs(result.check)
                if log.is_file()
            )
            target.write_text(scrub(text), encoding="utf-8")
        except OSError:
            continue  # the report has the last lines
        kept.append(target)
    return kept


class _View:
    """A line a check; on a terminal also what is being done and for how long."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._live = out.is_terminal and not out.is_dumb_terminal
        self._status: Status | None = None

    def __enter__(self) -> _View:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def begin(self, check: Check) -> None:
        if self._live:
            self._status = self._out.status(escape(f"{check.name}: {check.what}"))
            self._status.start()
        elif check.dear:
            # A log or a pipe shows that something long has begun.
            self._out.print(
                escape(f"...      {check.name:<10}        {check.what}"), soft_wrap=True
            )
            self._out.file.flush()

    def tick(self, check: Check, seconds: float) -> None:
        if self._status is not None:
            self._status.update(escape(f"{check.name}: {check.what} ({seconds:.0f} s)"))

    def end(self, result: Result) -> None:
        self._stop()
        style = _STYLE[result.verdict]
        took = f"{result.seconds:5.1f} s" if result.seconds else " " * 7
        shows = f"  [dim]\\[{escape(result.category)}][/]" if result.category else ""
        line = f"[{style}]{result.verdict:<8}[/] {result.check.name:<10} {took}  "
        self._out.print(line + escape(result.text) + shows, soft_wrap=True)
        self._out.file.flush()

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _list(checks: Sequence[Check], as_json: bool) -> None:
    rows = [
        {
            "name": check.name,
            "what": check.what,
            "dear": check.dear,
            "limit_seconds": check.limit,
            "needs": list(check.needs),
            "gpu": check.gpu,
            "gpu_mib": check.gpu_mib,
            "memory_mib": check.ram_mib,
        }
        for check in checks
    ]
    if as_json:
        print_json({"checks": rows})
        return
    table = Table("check", "what", "cost", "needs")
    for check in checks:
        cost = "dear" if check.dear else "cheap"
        table.add_row(check.name, escape(check.what), cost, ", ".join(check.needs))
    console().print(table)


def _conclude(document: dict[str, Any], report: Path, logs: Sequence[Path], out: Console) -> None:
    counts = document["counts"]
    out.print()
    out.print(
        f"{counts['ok']} ok, {counts['skipped']} skipped, {counts['failed']} failed "
        f"in {document['seconds']:.0f} s"
    )
    out.print(f"[bold]report[/]  {escape(str(report))}  (no personal details)", soft_wrap=True)
    for log in logs:
        out.print(f"[bold]log[/]     {escape(str(log))}", soft_wrap=True)
