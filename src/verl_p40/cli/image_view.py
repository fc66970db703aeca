"""What ``verl-p40 image`` shows to people."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from verl_p40.cli.output import console, print_json
from verl_p40.image import contents
from verl_p40.image.build import Plan
from verl_p40.image.describe import Description
from verl_p40.image.verify import Verdict

SHOWN_PACKAGES = ("verl", "torch", "vllm", "triton", "transformers", "ray")
SMALL = 100_000
"""Bytes below which a step is not worth a line of its own."""


def print_plan(plan: Plan, as_json: bool) -> None:
    """The docker command, to paste."""
    added = {k: v for k, v in plan.environ.items() if k == "DOCKER_BUILDKIT"}
    if as_json:
        print_json({"command": plan.command, "environ": added, "context": str(plan.context)})
        return
    words = [f"{name}={value}" for name, value in added.items()]
    # Nothing of rich's wrapping or markup: this gets pasted.
    print(" ".join([*words, shlex.join(plan.command)]))


def print_description(found: Description) -> None:
    out = console()
    for name, text in _facts(found):
        for index, line in enumerate(text.splitlines() or [""]):
            word = name if index == 0 else ""
            # Whole lines: the terminal wraps them, and a digest can still be copied.
            out.print(f"[bold]{word:<11}[/]{escape(line)}", soft_wrap=True)
    _print_steps(out, found)


def _facts(found: Description) -> list[tuple[str, str]]:
    compressed = (
        f"{decimal(found.compressed)} to download"
        if found.compressed is not None
        else f"to download not known: {found.compressed_reason}"
    )
    facts = [
        ("image", ", ".join(found.tags) or found.image),
        ("id", found.id),
        ("digest", "\n".join(found.digests) or "none: never pushed or pulled"),
        ("created", found.created[:19].replace("T", " ")),
        ("size", f"{decimal(found.size)}, {compressed}"),
        ("platform", found.platform),
        ("user", found.user or "root"),
        ("entrypoint", " ".join(found.entrypoint) or "none"),
        ("command", " ".join(found.command) or "none"),
    ]
    shown = [(name, value) for name, value in found.labels.items() if value]
    if shown:
        facts.append(("labels", "\n".join(f"{name}={value}" for name, value in shown)))
    if found.environment is None:
        facts.append(("contents", found.environment_reason))
        return facts
    return facts + _contents(found)


def _contents(found: Description) -> list[tuple[str, str]]:
    inside = found.environment or {}

    def get(field: str) -> str:
        value = contents.value(inside, field)
        return "" if value is None else str(value)

    packages = inside.get("packages") or {}
    versions = [f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages]
    facts = [
        ("verl-p40", " ".join(filter(None, (get("verl_p40"), get("revision"), get("target"))))),
        ("base", " · ".join(filter(None, (get("base_image"), get("system"))))),
        ("versions", ", ".join([f"Python {get('python')}", *versions])),
        ("packages", str(len(packages))),
    ]
    if found.patches_digest:
        names = contents.value(inside, "patches.verl.patches") or ()
        facts.append(("patches", f"{len(names)} on verl, digest {found.patches_digest}"))
    if lock := get("lock.sha256"):
        facts.append(("lock", f"{get('lock.file')}, sha256 {lock}"))
    if architectures := contents.value(inside, "torch_architectures"):
        facts.append(("torch for", " ".join(map(str, architectures))))
    return facts


def _print_steps(out: Console, found: Description) -> None:
    width = max(out.width - 24, 40) if out.is_terminal else 200
    downloads = found.compressed is not None
    out.print()
    out.print(f"[bold]{'size':>10}  {'download  ' if downloads else ''}made by[/]")
    small = [step for step in found.steps if step.size < SMALL]
    for step in found.steps:
        if step.size < SMALL:
            continue
        download = "" if step.compressed is None else decimal(step.compressed)
        text = step.instruction or "(imported)"
        text = text if len(text) <= width else f"{text[: width - 1]}…"
        column = f"{download:>8}  " if downloads else ""
        out.print(f"{decimal(step.size):>10}  {column}{escape(text)}", soft_wrap=True)
    if small:
        total = decimal(sum(step.size for step in small))
        out.print(f"and {len(small)} steps below {decimal(SMALL)}, {total} together")


def print_verdict(verdict: Verdict) -> None:
    out = console()
    for check in verdict.checks:
        word = "[green]same[/]" if check.ok else "[red]differs[/]"
        out.print(f"{word}  {escape(check.name)}: {escape(check.result)}")
        for line in check.differences:
            out.print(f"    {escape(line)}")
    for note in verdict.notes:
        out.print(f"note  {escape(note)}")
    if verdict.ok:
        out.print(f"{escape(verdict.image)} is the image that was published: {verdict.digest}")
    else:
        count = sum(len(check.differences) for check in verdict.checks)
        word = "difference" if count == 1 else "differences"
        out.print(f"{escape(verdict.image)} is NOT the image that was published: {count} {word}")
