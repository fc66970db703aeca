"""What the commands of ``verl-p40 kernels`` share, and how compiled kernels are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from verl_p40.cli.output import stderr_console
from verl_p40.kernels.capability import Capability
from verl_p40.kernels.triton_compile import Compiled, Outcome, Variant
from verl_p40.stack import env

CcOption = Annotated[
    str, typer.Option("--cc", help="Compute capability of the card: 6.1 is a Tesla P40.")
]

STYLE = {
    Outcome.RUNS: "green",
    Outcome.SHARED: "bold red",
    Outcome.UNSUPPORTED: "bold red",
    Outcome.ABORTED: "bold red",
    Outcome.REFUSED: "yellow",
    Outcome.FAILED: "magenta",
}


def stack_environment() -> env.StackEnv | None:
    """The stack environment to look packages up in; None where none is installed."""
    found = env.adopted()
    if found is not None:
        return found
    ready = sorted(env.installed(), key=lambda item: not env.is_current(item))
    return ready[0] if ready else None


@contextmanager
def working(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being done; nothing in a pipe."""
    out = stderr_console()
    if quiet or not out.is_terminal:
        yield lambda text: None
        return
    with out.status("") as status:
        yield lambda text: status.update(escape(text))


def show_variant(out: Console, variant: Variant, limit: int) -> None:
    """One kernel with one set of variables; ``limit`` is the card's shared memory in bytes."""
    best = variant.best
    variables = ", ".join(
        f"{name}={value}" for name, value in variant.variables.items() if name != "x"
    )
    out.print(
        f"  [{STYLE[best.outcome]}]{best.outcome.value}[/] [bold]{escape(variant.kernel.key)}[/] "
        f"{escape(variables)}"
    )
    shown = variant.configurations
    if len(shown) > 1:
        running = sum(item.outcome is Outcome.RUNS for item in shown)
        out.print(f"      autotuned: {running} of {len(shown)} configurations can run; the best:")
        shown = [best]
    for item in shown:
        _show_configuration(out, item, limit)
    if variant.kernel.reached:
        out.print(
            f"      [yellow]reached with {', '.join(variant.kernel.reached)}[/]: "
            f"{escape(variant.kernel.why)}"
        )
    elif variant.kernel.why:
        out.print(f"      [dim]not on the P40 path: {escape(variant.kernel.why)}[/]")


def _show_configuration(out: Console, item: Compiled, limit: int) -> None:
    blocks = " ".join(
        f"{name}={value}" for name, value in item.constants.items() if "BLOCK" in name.upper()
    )
    facts = []
    if item.num_warps is not None:
        facts.append(f"{item.num_warps} warps")
    if item.shared is not None:
        facts.append(f"{item.shared:,} of {limit:,} bytes shared")
    if item.registers is not None:
        facts.append(f"{item.registers} registers")
        stores, loads = item.spill_stores or 0, item.spill_loads or 0
        facts.append(f"spills {stores:,}/{loads:,} bytes (stores/loads)" if stores else "no spills")
    if facts:
        out.print(f"      {', '.join(facts)}  [dim]{escape(blocks)}[/]")
    if item.message:
        out.print(f"      {escape(item.message)}")


def show_summary(out: Console, variants: list[Variant], card: Capability, limit: int) -> None:
    """What can run, what cannot, and what of that the P40 path gets to."""
    counts = {
        outcome: sum(variant.outcome is outcome for variant in variants) for outcome in Outcome
    }
    said = ", ".join(f"{number} {outcome.value}" for outcome, number in counts.items() if number)
    versions = ", ".join(sorted({variant.triton for variant in variants if variant.triton}))
    out.print(
        f"\n{len(variants)} variants compiled by Triton {versions} for compute capability {card} "
        f"({limit:,} bytes of shared memory a block): {said}"
    )
    hit = sorted(
        {
            f"{variant.kernel.launch.kernel} ({', '.join(variant.kernel.reached)})"
            for variant in variants
            if variant.kernel.reached and variant.outcome is not Outcome.RUNS
        }
    )
    if hit:
        out.print(f"[yellow]cannot run, and reached with these settings:[/] {'; '.join(hit)}")
    out.print(f"[dim]category: sm_{card.sm} code generation; nothing was run on a GPU[/]")
