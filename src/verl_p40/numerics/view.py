"""The result of a run as a table: a line a kernel, or every comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kernel, in order of appearance: how many comparisons, the worst, the most shared memory."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        kernel = found.setdefault(row["kernel"], {**row, "cases": 0, "failed": 0})
        kernel["cases"] += 1
        kernel["failed"] += not row["ok"]
        if _badness(row) > _badness(kernel):
            kernel.update(error=row["error"], case=row["case"])
        if _badness(row, "vector") > _badness(kernel, "vector"):
            kernel["vector"] = row["vector"]
        kernel["shared"] = max(kernel["shared"], row["shared"])
    return list(found.values())


def _badness(row: Mapping[str, Any], key: str = "error") -> tuple[bool, float]:
    """NaN is worse than any number, and compares with none."""
    error = float(row[key])
    return math.isnan(error), 0.0 if math.isnan(error) else error


def _error(row: Mapping[str, Any], key: str = "error") -> str:
    if row["bound"] == 0 and row[key] == 0:
        return "exact"
    return f"{row[key]:.1e}"


def show(out: Console, report: Mapping[str, Any], every: bool) -> None:
    """Print a report: with ``every``, each comparison instead of each kernel's worst."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", no_wrap=True)
    if not every:
        table.add_column("cases", justify="right")
    table.add_column("case" if every else "worst case", overflow="fold")
    table.add_column("relative error", justify="right", no_wrap=True)
    table.add_column("worst vector", justify="right", no_wrap=True)
    table.add_column("shared bytes", justify="right", no_wrap=True)
    rows = report["rows"]
    for row in rows if every else summary(rows):
        failed = not row["ok"] if every else row["failed"]
        style = "bold red" if failed else "green"
        cells = [escape(row["kernel"])]
        cells += [] if every else [str(row["cases"])]
        cells += [escape(row["case"]), f"[{style}]{_error(row)}[/]", _error(row, "vector")]
        cells.append(f"{row['shared']:,}")
        table.add_row(*cells)
    out.print(table)
    out.soft_wrap = True  # of the sentences
    failed = sum(not row["ok"] for row in rows)
    limit = report["shared_limit"]
    verdict = (
        f"[bold red]{failed} of {len(rows)} comparisons failed[/]"
        if failed
        else f"[green]all {len(rows)} comparisons passed[/]"
    )
    out.print(
        f"\n{verdict}: relative error at most {report['bound']:.0e} (exact where data is only "
        f"moved), at most {limit:,} bytes of shared memory a block"
    )
    out.print(
        f"paged_attention_v1 fits such a block up to {report['v1_longest']:,} tokens; vLLM takes it "
        f"up to {report['v1_used_to']:,}"
    )
    compiled = report["driver_compiled"]
    out.print(
        f"{escape(report['gpu'])} ({report['compute_capability']}), driver {report['driver']}; "
        f"PTX {', '.join(report['ptx_targets'])}, of which the driver made "
        f"{', '.join(f'sm_{number}' for number in compiled['binary'])} code (it says PTX version "
        f"{', '.join(map(str, compiled['ptx']))})"
    )
    out.print(
        f"vLLM {report['vllm']} patched (queue {str(report['queue'])[:12]}), nvcc "
        f"{report['nvcc']}, Triton {report['triton']}; {report['at']}"
    )
    out.print(f"[dim]category: {escape(report['category'])}[/]")
