"""Which patch of the queue changed a site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from verl_p40.audit.model import Finding

_HUNK = re.compile(r"^@@ -(\d+)")


class _Removed(NamedTuple):
    line: int
    text: str
    patch: str


class Queue:
    """The lines that each patch of ``patches/<package>`` removes, by file."""

    def __init__(self, folder: Path) -> None:
        self._removed: dict[str, list[_Removed]] = {}
        self._touched: dict[str, list[str]] = {}
        series = folder / "series"
        if not series.is_file():
            return
        for line in series.read_text(encoding="utf-8").splitlines():
            name = line.partition("#")[0].strip()
            if name and (folder / name).is_file():
                self._read(name, (folder / name).read_text(encoding="utf-8"))

    def _read(self, name: str, text: str) -> None:
        path, number = "", 0
        for line in text.splitlines():
            if line.startswith("--- a/"):
                path = line[len("--- a/") :].split("\t")[0]
                self._touched.setdefault(path, []).append(name)
            elif match := _HUNK.match(line):
                number = int(match.group(1))
            elif path and line.startswith("-") and not line.startswith("--- "):
                removed = _Removed(number, line[1:].strip(), name)
                self._removed.setdefault(path, []).append(removed)
                number += 1
            elif line.startswith(" ") or not line:
                number += 1

    def patch_of(self, finding: Finding) -> str:
        """The patch that removes the finding's line; else those that touch its file."""
        near = sorted(
            (abs(removed.line - finding.line), removed.patch)
            for removed in self._removed.get(finding.path, [])
            if removed.text == finding.source
        )
        return near[0][1] if near else ", ".join(self._touched.get(finding.path, []))
