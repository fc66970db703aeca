"""``verl-p40 audit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_p40.audit import fail_on
from verl_p40.audit.model import Finding, Status
from verl_p40.audit.rules import RULES
from verl_p40.audit.settings import (
    KINDS,
    SettingFinding,
    check_command,
    check_environment,
    problems,
)
from verl_p40.audit.tree_audit import Report, audit
from verl_p40.audit.trees import Tree, open_trees
from verl_p40.cli.output import JsonFlag, console, print_json
from verl_p40.errors import ExitCode, MachineError, UsageError
from verl_p40.stack import env

_STYLE = {
    Status.FAILURE: "bold red",
    Status.PATCHED: "green",
    Status.UNREACHABLE: "cyan",
    Status.ACCEPTED: "cyan",
}
_KIND_STYLE = {"harmful": "bold red", "wrong": "red", "no-op": "yellow", "ok-note": "cyan"}
_WIDE = 110
"""Columns from which the table has room for what each rule finds."""
_MAX_SCRIPT_BYTES = 2_000_000

EPILOG = (
    "Examples: verl-p40 audit  ·  verl-p40 audit train.sh  ·  "
    "verl-p40 audit --command 'VLLM_DTYPE=float32 python -m verl.trainer.main_ppo data.train_batch_size=1'"
)


def register(app: typer.Typer) -> None:
    """Add this group to ``app``."""
    app.command("audit", epilog=EPILOG)(audit_command)


def audit_command(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A verl or vllm package folder, site-packages, a wheel, an sdist, a shell script, "
            "or - for a command line on standard input. Default: the stack's own verl.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", "-c", help="Audit this command line instead.")
    ] = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="Audit the variables of this shell instead.")
    ] = False,
    pristine: Annotated[
        Path | None,
        typer.Option(help="The unpatched release to compare with, if the tree carries none."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="List every site, not the failures alone.")
    ] = False,
    fail: Annotated[
        str,
        typer.Option(
            "--fail-on",
            help="What makes the exit code 1: some of " + ", ".join(fail_on.LEVELS) + "; or never.",
        ),
    ] = fail_on.DEFAULT,
    as_json: JsonFlag = False,
) -> int:
    """Show what still asks for BF16, FlashAttention, torch.compile, Triton or an sm_70+ feature.

    For a script, a command line or an environment: which settings do nothing or are wrong, and
    what to write instead. Exit code 0: clean; 1: something of --fail-on was found.
    """
    levels = fail_on.parse(fail)
    if sum([path is not None, command is not None, environment]) > 1:
        raise UsageError(
            "give one of PATH, --command and --environment", fix="see verl-p40 audit --help"
        )
    if environment:
        return _settings("environment", check_environment(os.environ), [], levels, as_json)
    text, origin = _script(path, command)
    if text is not None:
        return _settings(origin, check_command(text), problems(text), levels, as_json)
    return _trees(path, pristine, every, levels, as_json)


def _script(path: Path | None, command: str | None) -> tuple[str | None, str]:
    """The text to audit as a script and where it is from; None when PATH is a tree."""
    if command is not None:
        return command, "command"
    if path is None:
        return None, ""
    if str(path) == "-":
        return sys.stdin.read(_MAX_SCRIPT_BYTES), "standard input"
    if not path.is_file() or path.suffix in {".whl", ".zip", ".gz", ".tgz", ".tar", ".bz2", ".xz"}:
        return None, ""
    data = path.read_bytes()[:_MAX_SCRIPT_BYTES]
    shebang = data[:2] == b"#!" and b"sh" in data.split(b"\n", 1)[0]
    if path.suffix in {".sh", ".bash"} or shebang:
        if b"\0" in data:
            raise UsageError(f"{path} is not a text file", fix="give a shell script")
        return data.decode("utf-8", "replace"), str(path)
    return None, ""


# -- trees ----------------------------------------------------------------------------------


def _trees(
    path: Path | None, pristine: Path | None, every: bool, levels: frozenset[str], as_json: bool
) -> int:
    trees = open_trees(path if path is not None else _stack_verl())
    originals = {tree.package: tree for tree in open_trees(pristine)} if pristine else {}
    reports = [audit(tree, _changed(tree, originals.get(tree.package))) for tree in trees]
    failed = fail_on.tree_fails(reports, levels)
    if as_json:
        print_json({"ok": not failed, "trees": [report.to_json() for report in reports]})
    else:
        out = console()
        for report in reports:
            _show(out, report, every)
    return ExitCode.FOUND if failed else ExitCode.OK


def _stack_verl() -> Path:
    found = env.adopted()
    if found is None:
        ready = sorted(env.installed(), key=lambda item: not env.is_current(item))
        if not ready:
            raise MachineError(
                "no training stack is installed here, so there is no verl to audit by default",
                fix="verl-p40 stack install, or give a PATH: verl-p40 audit site-packages/verl",
            )
        found = ready[0]
    return found.site_packages / "verl"


def _changed(tree: Tree, original: Tree | None) -> dict[str, bytes] | None:
    if original is None:
        return None
    if original.version != tree.version:
        raise UsageError(
            f"--pristine is {original.package} {original.version}, the tree is {tree.version}",
            fix="give the same release",
        )
    return {
        name: original.read(name)
        for name in original
        if name not in tree.files or tree.read(name) != original.read(name)
    }


def _show(out: Console, report: Report, every: bool) -> None:
    kind = "patched" if report.patched_tree else "unpatched"
    out.print(
        f"[bold]{report.package} {report.version}[/] ({kind}), {report.files} files, "
        f"{report.seconds:.1f} s: {escape(report.origin)}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rule", no_wrap=True)
    for status in Status:
        table.add_column(status.value, justify="right", style=_STYLE[status], no_wrap=True)
    if wide := out.width >= _WIDE:
        table.add_column("what")
    for rule, counts in report.by_rule().items():
        cells = [str(counts[status] or "·") for status in Status]
        table.add_row(rule, *cells, *([RULES[rule].title] if wide else []))
    table.add_section()
    totals = [str(report.count(status)) for status in Status]
    table.add_row("total", *totals)
    out.print(table)
    shown = report.findings if every else report.failures
    for rule in RULES:
        group = [finding for finding in shown if finding.rule == rule]
        if group:
            out.print(f"\n[bold]{rule}[/]: {RULES[rule].why}")
            for finding in group:
                _show_finding(out, finding)
    for title, lines in (
        ("review needs care", report.stale),
        ("review does not hold here", report.broken),
        ("note", report.notes),
    ):
        for line in lines:
            out.print(f"[yellow]{title}:[/] {escape(line)}")
    if not report.failures and not report.stale:
        out.print("[green]clean:[/] every site is patched, or off the path for a reviewed reason")


def _show_finding(out: Console, finding: Finding) -> None:
    where = f"{finding.path}:{finding.line}:{finding.column}"
    style = _STYLE[finding.status]
    out.print(f"  [{style}]{finding.status.value}[/] {escape(where)} in {escape(finding.qualname)}")
    out.print(f"      {escape(finding.source)}")
    if finding.guard:
        out.print(f"      [dim]under line {finding.guard_line}: {escape(finding.guard)}[/]")
    if finding.patch:
        out.print(f"      [green]by {escape(finding.patch)}[/]")
    if finding.reason:
        reach = f" Reached by: {'; '.join(finding.reached_by)}." if finding.reached_by else ""
        out.print(f"      [dim]{escape(finding.reason + reach)}[/]")


# -- settings -------------------------------------------------------------------------------


def _settings(
    origin: str,
    findings: list[SettingFinding],
    unread: list[str],
    levels: frozenset[str],
    as_json: bool,
) -> int:
    failed = fail_on.settings_fail(findings, levels)
    counts = {kind: sum(f.kind == kind for f in findings) for kind in KINDS}
    if as_json:
        print_json(
            {
                "ok": not failed,
                "origin": origin,
                "counts": counts,
                "problems": unread,
                "findings": [finding.to_json() for finding in findings],
            }
        )
        return ExitCode.FOUND if failed else ExitCode.OK
    out = console()
    for finding in findings:
        where = f"line {finding.line}: " if finding.line else ""
        out.print(
            f"[{_KIND_STYLE[finding.kind]}]{finding.kind}[/] {where}"
            f"[bold]{escape(finding.setting)}[/]"
        )
        out.print(f"    {escape(finding.message)}")
        if finding.replacement:
            out.print(f"    [green]instead:[/] {escape(finding.replacement)}")
        out.print(f"    [dim]{escape(finding.source)} ({escape(finding.rule)})[/]")
    for line in unread:
        out.print(f"[yellow]not read to the end:[/] {escape(line)}")
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    out.print(f"{escape(origin)}: {told or 'nothing to say, the settings are fine'}")
    return ExitCode.FOUND if failed else ExitCode.OK
