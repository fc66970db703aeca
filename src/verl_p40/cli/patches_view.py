"""What ``verl-p40 patches`` prints of its larger reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table

from verl_p40.cli.output import console, print_json
from verl_p40.patches.hunks import Fit
from verl_p40.patches.prove import Matrix
from verl_p40.patches.queue import Patch, Queue
from verl_p40.patches.tree import ApplyReport
from verl_p40.patches.verify import StatusReport

_WORDS = {
    Fit.EXACT: ("green", "applies", "exact"),
    Fit.OFFSET: ("green", "applies at other lines", "at other lines"),
    Fit.UPSTREAM: ("cyan", "already upstream", "upstream"),
    Fit.PARTLY: ("yellow", "partly upstream", "partly upstream"),
    Fit.FUZZ: ("yellow", "needs fuzz", "with fuzz"),
    Fit.CONFLICT: ("red", "conflict", "in conflict"),
}
"""Color, verdict on one patch, and what to count the verdicts as."""


def _table(names: Iterable[str], *columns: str) -> Table:
    """A table whose first column, the patch, is never cut: people copy it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("patch", no_wrap=True, min_width=max(map(len, names), default=0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _short(patch: Patch) -> str:
    return patch.path.removesuffix(".patch")


def patch_table(queue: Queue) -> Table:
    """The patches, what each does, what it prevents and which files it touches."""
    table = _table(map(_short, queue.patches), "what it does, what it prevents, files")
    for patch in queue.patches:
        files = "\n".join(name.removeprefix(f"{queue.project}/") for name in patch.touches)
        prevents = " ".join(patch.header.get("Prevents").split())
        text = (
            f"{escape(patch.header.summary)}\n[red]{escape(prevents)}[/]\n[dim]{escape(files)}[/]"
        )
        table.add_row(_short(patch), text)
    return table


def print_report(report: ApplyReport, as_json: bool) -> None:
    if as_json:
        print_json(vars(report))
        return
    out = console()
    if report.recovered:
        out.print("an interrupted call had left the package moved aside: put back")
    for name in report.left_out:
        out.print(f"left out: {escape(name)}")
    for line in report.shifted:
        out.print(f"[dim]shifted: {escape(line)}[/]")
    where = escape(str(report.tree))
    if not report.patches:
        done = "released files are back" if report.changed else "is unpatched already"
        out.print(f"{where}: {done}")
        return
    done = "applied" if report.changed else "already applied, nothing to do"
    counts = f"{len(report.patches)} patches, {len(report.files)} files"
    out.print(f"{where}: {counts}, queue {report.digest[:12]}: {done}")


def print_status(queue: Queue, report: StatusReport, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "target": report.target,
                "clean": report.clean,
                "changed": report.changed,
                "patches": [
                    {"path": fit.patch.path, "fit": fit.fit.name.lower(), "details": fit.details}
                    for fit in report.fits
                ],
            }
        )
        return
    table = _table((_short(fit.patch) for fit in report.fits), "fit")
    for fit in report.fits:
        color, word, _ = _WORDS[fit.fit]
        table.add_row(_short(fit.patch), escape("\n".join((word, *fit.details))), style=color)
    out = console()
    out.print(table)
    counts = {noun: sum(f.fit is kind for f in report.fits) for kind, (*_, noun) in _WORDS.items()}
    out.print(
        f"{queue.project} {queue.version} -> {escape(report.target)}: "
        f"{', '.join(f'{count} {noun}' for noun, count in counts.items() if count)}; "
        f"{len(report.changed)} of the patched files differ"
    )


def print_matrix(matrix: Matrix, as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                **{key: value for key, value in vars(proof).items() if key != "patch"},
                "patch": proof.patch.path,
                "test": proof.patch.header.get("Proved-By"),
            }
            for proof in matrix.proofs
        ]
        print_json({"proven": matrix.proven, "proofs": rows})
        return
    names = [_short(proof.patch) for proof in matrix.proofs]
    table = _table(names, "with all, without it: why")
    for name, proof in zip(names, matrix.proofs, strict=True):
        also = len(proof.left_out) - 1
        color, text = ("red", proof.problem) if proof.problem else ("green", proof.evidence)
        row = f"{proof.with_all}, {proof.without}"
        row += f" (with {also} that need it)" if also else ""
        table.add_row(name, f"[{color}]{escape(row)}[/]: {escape(text)}")
    out = console()
    out.print(table)
    bad = sum(bool(proof.problem) for proof in matrix.proofs)
    out.print(f"{len(matrix.proofs) - bad} of {len(matrix.proofs)} patches proven necessary")
