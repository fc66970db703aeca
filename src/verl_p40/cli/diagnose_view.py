"""How a diagnosis is shown: to people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from verl_p40.diagnose import Diagnosis, Finding
from verl_p40.diagnose.attempts import Attempt
from verl_p40.diagnose.inputs import Source
from verl_p40.diagnose.scan import Line

_WIDTH = 240
_SYMPTOMS = 6
_STYLE = {"high": "green", "medium": "yellow", "low": "red"}


def to_json(diagnosis: Diagnosis, source: Source) -> dict[str, Any]:
    """The document of ``--json``; ``schema`` changes when a key does."""
    return {
        "schema": 1,
        "log": source.name,
        "attempt": source.attempt.to_json() if source.attempt else None,
        "earlier_attempts": [attempt.to_json() for attempt in _earlier(source)],
        "result": diagnosis.result,
        "causes": [_finding(finding, source) for finding in diagnosis.causes],
        "symptoms": [_finding(finding, source) for finding in diagnosis.symptoms],
        "harmless": [_finding(finding, source) for finding in diagnosis.harmless],
        "suspicious": [_line(line, source) for line in diagnosis.suspicious],
        "last_progress_line": diagnosis.progress or None,
        "lines": diagnosis.lines,
        "bytes": diagnosis.size,
        "lines_left_out": diagnosis.dropped,
    }


def _finding(finding: Finding, source: Source) -> dict[str, Any]:
    return {
        "id": finding.id,
        "kind": finding.kind,
        "text": finding.text,
        "confidence": finding.confidence,
        "why": finding.why,
        "fix": list(finding.fix),
        "read": list(finding.read),
        "versions": finding.versions,
        "details": finding.details,
        "evidence": [_line(line, source) for line in finding.evidence],
    }


def _line(line: Line, source: Source) -> dict[str, Any]:
    return {"where": f"{source.name}:{line.number}", "text": line.text, "process": line.source}


def show(out: Console, diagnosis: Diagnosis, source: Source) -> None:
    """Print the answer first, then what it rests on."""
    _which(out, source)
    for number, cause in enumerate(diagnosis.causes):
        if number:
            out.print()
        head = "cause" if not number else "and, independent of it"
        out.print(f"[bold red]{head}:[/] {escape(cause.text)}")
        _evidence(out, cause.evidence, source)
        style = _STYLE[cause.confidence]
        out.print(f"  [bold]confidence:[/] [{style}]{cause.confidence}[/]: {escape(cause.why)}")
        if cause.versions:
            out.print(f"  [bold]versions:[/] {escape(cause.versions)}")
        out.print("  [bold]fix:[/]")
        for step in cause.fix:
            out.print(f"    {escape(step)}")
        if cause.read:
            out.print(f"  [bold]read:[/] {escape(', '.join(cause.read))}")
    if not diagnosis.causes:
        _nothing(out, diagnosis, source)
    _also(out, "only a symptom", diagnosis.symptoms, source)
    _also(out, "harmless", diagnosis.harmless, source)
    if diagnosis.dropped:
        out.print(f"[dim]{diagnosis.dropped:,} lines around repeated errors were left out[/]")


def _earlier(source: Source) -> list[Attempt]:
    """Attempts before the one that was read which went wrong too."""
    chosen = source.attempt
    if chosen is None:
        return []
    return [a for a in source.attempts if a.number < chosen.number and a.went_wrong]


def _which(out: Console, source: Source) -> None:
    """Which attempt of a run this is about, where there was more than one."""
    chosen = source.attempt
    if chosen is None or len(source.attempts) < 2:
        return
    how = chosen.status or "killed"
    out.print(
        f"[dim]attempt {chosen.number} of {len(source.attempts)} ({chosen.action}, "
        f"{escape(chosen.time)}): {how} at step {chosen.step}[/]"
    )
    for other in source.attempts:
        if other.number > chosen.number:
            out.print(f"[dim]attempt {other.number} after it: {other.status}[/]")
        elif other.went_wrong:
            error = f": {other.error}" if other.error else ""
            out.print(
                f"[dim]attempt {other.number} before it {other.status or 'killed'} at step "
                f"{other.step}{escape(error[:_WIDTH])}[/]"
            )


def _evidence(out: Console, lines: Sequence[Line], source: Source) -> None:
    for line in lines[:6]:
        process = f" ({line.source})" if line.source else ""
        out.print(
            f"  [dim]{escape(source.name)}:{line.number}{escape(process)}[/]  "
            f"{escape(line.text.strip()[:_WIDTH])}"
        )


def _also(out: Console, head: str, findings: Sequence[Finding], source: Source) -> None:
    if not findings:
        return
    out.print(f"[bold]{head}:[/]")
    for finding in findings[:_SYMPTOMS]:
        out.print(
            f"  [dim]{escape(source.name)}:{finding.line}[/]  {escape(finding.text)} "
            f"[dim]({escape(finding.why)})[/]"
            if finding.why
            else f"  [dim]{escape(source.name)}:{finding.line}[/]  {escape(finding.text)}"
        )
    if len(findings) > _SYMPTOMS:
        out.print(f"  [dim]and {len(findings) - _SYMPTOMS} more (--json lists them)[/]")


def _nothing(out: Console, diagnosis: Diagnosis, source: Source) -> None:
    if diagnosis.result == "harmless":
        out.print("[bold]no failure found:[/] what looks like one in this log is harmless")
        return
    out.print("[bold yellow]nothing known found[/] in this log")
    if diagnosis.suspicious:
        out.print("the most suspicious lines:")
        _evidence(out, diagnosis.suspicious, source)
    out.print(
        "to report it: open an issue with these lines, 50 lines before the first of them, "
        "and the output of `verl-p40 stack status`"
    )
