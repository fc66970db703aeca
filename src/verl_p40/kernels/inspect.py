"""``verl-p40 kernels binary``: from names to reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_p40.errors import UsageError
from verl_p40.kernels import binary, sources, verdict
from verl_p40.kernels.capability import Capability
from verl_p40.kernels.verdict import FileReport, Verdict
from verl_p40.kernels.view import Damaged
from verl_p40.stack.env import StackEnv

Progress = Callable[[str, int], None]
"""Told the file that is being looked into, and its bytes."""


@dataclass
class TargetReport:
    """Everything found under one name that the user gave."""

    target: str
    files: list[FileReport]

    @property
    def verdict(self) -> Verdict:
        return verdict.overall(self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "verdict": self.verdict.name.lower(),
            "files": [file.to_json() for file in self.files],
        }


def inspect(
    target: str,
    card: Capability,
    env: StackEnv | None,
    *,
    names: bool = False,
    progress: Progress | None = None,
) -> TargetReport:
    """Look into everything that ``target`` names.

    Raises:
        UsageError: nothing of that name, or nothing in it that could hold GPU code.
        DataError: an archive cannot be read at all. A damaged file inside of one, or of a
            folder, is a report with a ``problem``.
    """
    reports = []
    for source in sources.find(target, env):
        if progress:
            progress(source.name, source.size)
        try:
            with source.open() as view:
                report = verdict.judge(
                    source.name, source.size, binary.modules(view), card, names=names
                )
        except Damaged as damage:
            report = FileReport(source.name, source.size, problem=str(damage))
        reports.append(report)
    if not reports:
        raise UsageError(
            f"{target}: no file in there could hold GPU code",
            fix="it is pure Python, or data; a package that compiles at run time (Triton, NVRTC) "
            "is looked at with verl-p40 kernels triton",
        )
    return TargetReport(target, reports)
