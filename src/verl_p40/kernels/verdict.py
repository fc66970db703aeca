"""Whether modules of GPU code run on a card: for one module, a file, and everything looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl_p40.kernels.capability import Capability
from verl_p40.kernels.fatbin import Entry, Kind, Module
from verl_p40.kernels.view import Damaged

_MAYBE_EMPTY = 4096
"""A kernel's cubin is larger: a smaller one is looked into for whether it has any."""


class Verdict(Enum):
    NATIVE = "runs natively"
    JIT = "runs through JIT"
    PARTLY = "runs in part"
    CANNOT = "cannot run"
    NO_CODE = "no device code"
    UNREADABLE = "unreadable"


def best(module: Module, card: Capability) -> Entry | None:
    """The entry that the driver would take on ``card``: native code before PTX, newest first."""
    for kind, runs in ((Kind.CUBIN, card.runs_cubin), (Kind.PTX, card.runs_ptx)):
        fit = [e for e in module.entries if e.kind is kind and runs(e.sm, e.specific)]
        if fit:
            return max(fit, key=lambda entry: entry.sm)
    return None


def _has_kernels(entry: Entry) -> bool:
    if entry.unpacked > _MAYBE_EMPTY:
        return True
    try:
        return bool(entry.kernels())
    except Damaged:
        return True


def is_empty(module: Module) -> bool:
    """Whether no architecture's code has a kernel in it.

    A file with host code alone leaves such a module, and it must not decide anything.
    """
    return not any(_has_kernels(entry) for entry in module.entries if entry.is_code)


@dataclass
class FileReport:
    """What one file holds, for one card.

    Attributes:
        name: the file's path, or its name inside of a wheel or archive.
        targets: modules by target, such as ``{"sm_60": 341, "compute_90": 1}``.
        native, jit, missing: registered modules with kernels, by what the card can do with each.
        embedded: of those that a library loads by itself, how many there are, and how many run.
        ptx_isa: the newest PTX version among those that must be compiled by the driver.
        kernels: names by module, where asked for; ``(verdict, target, names)``.
        problem: why the file could not be read.
    """

    name: str
    size: int
    targets: Counter[str] = field(default_factory=Counter)
    native: int = 0
    jit: int = 0
    missing: int = 0
    empty: int = 0
    relocatable: int = 0
    embedded: int = 0
    embedded_runs: int = 0
    ptx_isa: tuple[int, int] = (0, 0)
    kernels: list[tuple[Verdict, str, list[str]]] = field(default_factory=list)
    problem: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.problem:
            return Verdict.UNREADABLE
        return combine(self.native, self.jit, self.missing, self.embedded_runs, self.embedded)

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.name,
            "bytes": self.size,
            "verdict": self.verdict.name.lower(),
            "targets": dict(sorted(self.targets.items(), key=lambda item: target_key(item[0]))),
            "modules": {
                "native": self.native,
                "jit": self.jit,
                "missing": self.missing,
                "empty": self.empty,
                "relocatable": self.relocatable,
                "embedded": self.embedded,
                "embedded_that_run": self.embedded_runs,
            },
            "ptx_isa": ".".join(map(str, self.ptx_isa)) if self.jit else None,
            "kernels": [
                {"verdict": verdict.name.lower(), "target": target, "names": names}
                for verdict, target, names in self.kernels
            ],
            "problem": self.problem or None,
        }


def combine(native: int, jit: int, missing: int, embedded_runs: int, embedded: int) -> Verdict:
    """The verdict on a number of modules.

    Embedded modules count as one: a library that carries one for every card, and chooses when it
    runs, lacks nothing when it has one for this card.
    """
    if embedded and not (native or jit or missing):
        return Verdict.NATIVE if embedded_runs else Verdict.CANNOT
    if native or jit:
        if missing:
            return Verdict.PARTLY
        return Verdict.JIT if jit else Verdict.NATIVE
    return Verdict.CANNOT if missing else Verdict.NO_CODE


def target_key(target: str) -> tuple[str, int, str]:
    """Sorts ``sm_50 < sm_90 < sm_90a < sm_100``, and ``compute_*`` before all of them."""
    prefix, _, number = target.partition("_")
    digits = number.rstrip("af")
    return prefix, int(digits), number[len(digits) :]


def judge(
    name: str, size: int, found: Iterable[Module], card: Capability, *, names: bool = False
) -> FileReport:
    """Put the modules of a file into a report; damage found on the way is its ``problem``."""
    report = FileReport(name, size)
    late: list[Module] = []
    registered = False
    try:
        for module in found:
            report.targets.update({entry.target: 1 for entry in module.entries}.keys())
            if module.place == "relocatable":
                report.relocatable += 1
                late.append(module)
                continue
            registered |= module.place == "registered"
            _count(report, module, card, names)
        if not registered:  # an object file or a static library: the device linker's input
            for module in late:
                _count(report, module, card, names)
    except Damaged as damage:
        report.problem = str(damage)
    return report


def _count(report: FileReport, module: Module, card: Capability, names: bool) -> None:
    chosen = best(module, card)
    if module.place == "embedded":
        report.embedded += 1
        report.embedded_runs += chosen is not None
        return
    if is_empty(module):
        report.empty += 1
        return
    # Kernels can be left out for old architectures by the preprocessor: the code is there, the
    # kernel is not in it, and a launch fails as if there were none.
    if chosen is None or not _has_kernels(chosen):
        verdict = Verdict.CANNOT
        report.missing += 1
    elif chosen.kind is Kind.CUBIN:
        verdict = Verdict.NATIVE
        report.native += 1
    else:
        verdict = Verdict.JIT
        report.jit += 1
        report.ptx_isa = max(report.ptx_isa, chosen.code_version)
    if names:
        try:
            listed = module.kernels(chosen if verdict is not Verdict.CANNOT else None)
        except Damaged as damage:
            listed = [f"({damage})"]
        report.kernels.append((verdict, chosen.target if chosen else "-", listed))


def overall(reports: Sequence[FileReport]) -> Verdict:
    """The verdict on several files together."""
    readable = [report for report in reports if not report.problem]
    if not readable and reports:
        return Verdict.UNREADABLE
    own = [report for report in readable if report.embedded]
    return combine(
        sum(report.native for report in readable),
        sum(report.jit for report in readable),
        sum(report.missing for report in readable),
        sum(report.embedded_runs for report in own),
        sum(report.embedded for report in own),
    )
