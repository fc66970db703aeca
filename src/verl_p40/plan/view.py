"""A plan for people: a stacked bar a phase, the verdict, host and disk."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from verl_p40.plan.fit import Change, Plan
from verl_p40.plan.phases import PARTS, Phase

GIB = 2**30

_COLOURS = dict(
    zip(
        PARTS,
        (
            "blue",
            "magenta",
            "green",
            "cyan",
            "bright_blue",
            "yellow",
            "red",
            "bright_green",
            "bright_magenta",
            "white",
        ),
        strict=True,
    )
)
_LETTERS = dict(zip(PARTS, "WMGTCALKVB", strict=True))
"""The bar reads without colours too."""


def document(plan: Plan, changes: list[Change] | None) -> dict[str, Any]:
    """The plan as JSON; sizes in bytes."""
    return {
        "fits": plan.fits,
        "card_bytes": plan.card,
        "peak_phase": plan.peak.name,
        "peak_allocated_bytes": plan.peak.allocated,
        "needed_bytes": plan.needed(plan.peak),
        "margin_bytes": plan.margin,
        "context_bytes": plan.context,
        "device": plan.setup.device,
        "cards": plan.setup.world,
        "model": {
            "name": plan.setup.actor.shape.name,
            "parameters": plan.setup.actor.parameters,
            "trained": plan.setup.actor.trained,
        },
        "phases": [
            {
                "name": phase.name,
                "allocated_bytes": phase.allocated,
                "needed_bytes": plan.needed(phase),
                "parts": phase.parts,
            }
            for phase in plan.phases
        ],
        "host": plan.host,
        "disk": {
            "checkpoint_bytes": plan.disk.checkpoint,
            "kept": plan.disk.kept,
            "total_bytes": plan.disk.total,
        },
        "changes": None
        if changes is None
        else [{"what": c.what, "cost": c.cost, "overrides": list(c.overrides)} for c in changes],
    }


def show(plan: Plan, changes: list[Change] | None, out: Console) -> None:
    setup, peak = plan.setup, plan.peak
    where = "this CPU" if setup.device == "cpu" else f"{setup.world} card(s)"
    kind = f"LoRA, {setup.actor.trained / 1e6:.0f}M trained" if setup.actor.lora else "full"
    out.print(
        f"[bold]{escape(setup.actor.shape.name)}[/], {setup.actor.parameters / 1e6:,.0f}M "
        f"parameters, {kind}, FP32, {setup.prompt} + {setup.response} tokens, {where}"
    )
    out.print(_bars(plan, max(out.width, 60)))
    out.print(_legend(plan))
    verdict = "[bold green]fits[/]" if plan.fits else "[bold red]does not fit[/]"
    if setup.device == "cuda":
        out.print(
            f"\n{verdict}: {peak.name} needs {_gib(plan.needed(peak))} of {_gib(plan.card)} "
            f"({_gib(peak.allocated)} allocated, {_gib(plan.context)} CUDA context, the rest "
            f"fragmentation); margin {_gib(plan.margin)}"
        )
    else:
        out.print(f"\npeak: {peak.name}, {_gib(peak.allocated)} of tensors")
    host = ", ".join(f"{name} {_gib(size)}" for name, size in plan.host.items())
    out.print(f"host memory: {_gib(sum(plan.host.values()))} ({host})", soft_wrap=True)
    disk = plan.disk
    if disk.checkpoint:
        kept = "every one is kept" if disk.kept is None else f"{disk.kept} kept"
        total = "" if disk.total is None else f", {_gib(disk.total)} while one more is written"
        out.print(f"disk: {_gib(disk.checkpoint)} a checkpoint, {kept}{total}")
    if plan.fits:
        return
    if changes is None:
        out.print("\nNo change of settings that we know makes it fit: a smaller model, or LoRA.")
        return
    out.print("\nwhat makes it fit, cheapest first:")
    for change in changes:
        out.print(f"  {change.what} ({change.cost})")
    pasted = " ".join(text for change in changes for text in change.overrides)
    out.print(f"\n  {escape(pasted)}", soft_wrap=True)


def _bars(plan: Plan, width: int) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("phase", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("allocated on a card", no_wrap=True)
    room = min(width - 26, 72)
    scale = max(plan.card if plan.setup.device == "cuda" else 0, plan.peak.allocated)
    for phase in plan.phases:
        name = f"[bold]{phase.name}[/] *" if phase is plan.peak else phase.name
        table.add_row(name, f"{phase.allocated / GIB:.2f}", _bar(phase, scale, room))
    return table


def _bar(phase: Phase, scale: int, room: int) -> Text:
    """The parts one behind the other; what is left of the card in dots."""
    bar, drawn, there = Text(), 0, 0
    for part, size in phase.parts.items():
        there += size
        cells = round(there / scale * room) - drawn
        bar.append(_LETTERS[part] * cells, style=_COLOURS[part])
        drawn += cells
    bar.append("." * (room - drawn), style="dim")
    return bar


def _legend(plan: Plan) -> RenderableType:
    seen = [part for part in PARTS if any(part in phase.parts for phase in plan.phases)]
    text = Text()
    for part in seen:
        text.append(f"{_LETTERS[part]} {part}   ", style=_COLOURS[part])
    return Group(Text(), text)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
