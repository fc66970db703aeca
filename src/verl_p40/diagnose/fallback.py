"""Where no rule knows the error: the program's first fatal one, in its own words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from verl_p40.diagnose.match import Hit, around
from verl_p40.diagnose.scan import Line, Scanned

if TYPE_CHECKING:
    from verl_p40.diagnose.judge import Finding

_FATAL = "Fatal Python error"
_CRASHED = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_BELOW = 8
"""Lines after Python's own crash report in which its first frame stands."""
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.+))?')


def first(
    weak: Sequence[Hit], everything: Sequence[Hit], scanned: Scanned, *, died: bool
) -> Hit | None:
    """The first fatal error among ``weak``, in the log's order.

    Not what its program calls a warning, not a line on which another rule has spoken, and nothing
    that training steps followed, unless the run ``died`` after them without saying why.
    """
    taken = {line.position for hit in everything for line in hit.evidence}
    fatal = [hit for hit in weak if not hit.line.mild and hit.line.position not in taken]
    late = [hit for hit in fatal if hit.last >= scanned.progress]
    if not late and died:
        late = fatal[-1:]
    return late[0] if late else None


def crashed_in(finding: Finding, hit: Hit, scanned: Scanned) -> Finding:
    """Of a crash that Python's faulthandler reports, add the innermost Python frame."""
    if _FATAL not in hit.line.text:
        return finding
    window = around(scanned.lines, hit.line.position)
    for line in window.lines[window.at + 1 : window.at + 1 + _BELOW]:
        frame = _CRASHED.match(line.text)
        if frame:
            return _with_frame(finding, line, frame, "It crashed in")
    return finding


def where(finding: Finding, hit: Hit, scanned: Scanned) -> Finding:
    """Add the innermost frame of the error's traceback."""
    for line in around(scanned.lines, hit.line.position).traceback:
        frame = _FRAME.match(line.text)
        if frame:
            return _with_frame(finding, line, frame, "Raised in")
    return finding


def _with_frame(finding: Finding, line: Line, frame: re.Match[str], how: str) -> Finding:
    file = "/".join(PurePath(frame["file"]).parts[-2:])
    function = f" ({frame['function']})" if frame["function"] else ""
    lines = {one.position: one for one in (line, *finding.evidence)}
    return replace(
        finding,
        text=f"{finding.text} {how} {file}, line {frame['line']}{function}.",
        evidence=tuple(lines[position] for position in sorted(lines)),
    )
