"""Find which rules speak, and on which lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from verl_p40.diagnose.model import Rule, rules
from verl_p40.diagnose.scan import AFTER, BEFORE, Line, Scanned

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File ".*", line \d+')
_NOTEBOOK = re.compile(r"^\s*(?:-+> )?(?:\d{1,5}|\[\d{1,5}\]\(file:\S+\)) {2,}\S")
_ERROR_LINE = re.compile(r"^\s*(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit): ")
"""No statement looks so: pasted tracebacks lose their indentation."""
_WARN_CALL = re.compile(r"^\s+(?:\w+\.)*(?:warn|warning|warn_once|warning_once)\(")
"""The statement that Python prints beneath a warning."""
_PASTED = 500
"""Telling lines above which a log is no report that somebody pasted."""
_GAP = re.compile(r"\.\*\??(?!\)?$|\))|\.\{0,(?:[2-9]\d|\d{3,})\}")
"""A gap in a pattern, in which other words may turn its meaning; not one at its end."""
_TELLING = 18
"""Characters of plain text from which a pattern is telling in spite of a gap."""
_HITS = 40
"""Hits of one rule that are looked at: the first ones, and the last."""


@dataclass(frozen=True)
class Hit:
    """A rule that speaks. ``evidence`` are the lines that made it, in the log's order."""

    rule: Rule
    line: Line
    groups: dict[str, str]
    evidence: tuple[Line, ...]
    last: int
    """Last line number at which the same was said."""
    depth: int | None = None
    """Lines between the error and the frame that decided, where a frame did."""
    loose: bool = False
    """Only single words with a gap between them were found, and nothing near them."""


def literal(pattern: str) -> str:
    """The longest text that every match of ``pattern`` holds, "" where none is easily told."""
    best = run = ""
    depth, index = 0, 0
    if pattern.startswith("(?i)"):
        return ""
    while index < len(pattern):
        char, step = pattern[index], 1
        plain = ""
        if char == "\\" and index + 1 < len(pattern):
            step = 2
            plain = "" if pattern[index + 1].isalnum() else pattern[index + 1]
        elif char == "[":
            closing = pattern.find("]", index + 2)
            step = max(1, closing - index + 1)
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            return ""
        elif char == "{":
            step = max(1, pattern.find("}", index) - index + 1)
        elif char not in ".^$*+?":
            plain = char
        following = pattern[index + step : index + step + 1]
        if plain and depth == 0:
            if following in ("?", "*", "{"):
                plain = ""
                best, run = max(best, run, key=len), ""
            run += plain
        if not plain or following in ("+",):
            best, run = max(best, run, key=len), ""
        index += step
    best = max(best, run, key=len)
    return best if len(best) >= 3 else ""


class Lazy:
    """A pattern that is compiled when it is first searched: most never are."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.needed = literal(pattern)
        self.loose = len(self.needed) < _TELLING and _GAP.search(pattern) is not None
        self._compiled: re.Pattern[str] | None = None

    def search(self, text: str) -> re.Match[str] | None:
        if self.needed not in text:
            return None
        if self._compiled is None:
            self._compiled = re.compile(self.pattern)
        return self._compiled.search(text)


@dataclass(frozen=True)
class Compiled:
    rule: Rule
    match: tuple[Lazy, ...]
    near: tuple[Lazy, ...]
    frames: tuple[Lazy, ...]
    unless: tuple[Lazy, ...]


def compile_rule(rule: Rule) -> Compiled:
    def all_of(patterns: Sequence[str]) -> tuple[Lazy, ...]:
        return tuple(Lazy(pattern) for pattern in patterns)

    return Compiled(
        rule=rule,
        match=all_of(rule.match),
        near=all_of(rule.near),
        frames=all_of(rule.frames),
        unless=all_of(rule.unless),
    )


@lru_cache(maxsize=1)
def compiled() -> tuple[Compiled, ...]:
    return tuple(compile_rule(rule) for rule in rules())


@dataclass
class _Around:
    """The lines around one line that the same process wrote."""

    lines: list[Line]
    at: int
    traceback: list[Line] = field(default_factory=list)


def around(lines: Sequence[Line], position: int) -> _Around:
    """Windows are measured in kept lines of the same source, and never cross a far gap."""
    here = lines[position]
    before: list[Line] = []
    traceback: list[Line] = []
    inside = True
    for line in reversed(lines[max(0, position - 6 * BEFORE) : position]):
        if line.source != here.source:
            continue
        if len(before) >= BEFORE:
            break
        before.append(line)
        if inside:
            traceback.append(line)
            inside = _TRACEBACK not in line.text
    after: list[Line] = []
    for line in lines[position + 1 : position + 1 + 4 * AFTER]:
        if line.source == here.source:
            after.append(line)
            if len(after) >= AFTER:
                break
    if not any(_FRAME.match(line.text) for line in traceback):
        traceback = [*reversed(_unfinished(after)), *traceback]
    before.reverse()
    return _Around([*before, here, *after], len(before), traceback)


def _unfinished(after: Sequence[Line]) -> list[Line]:
    """The traceback of another rank below an error that has none, where it is cut off.

    Ranks that die of the same error print into each other.
    """
    start = next((n for n, line in enumerate(after) if _TRACEBACK in line.text), None)
    if start is None or any(_ERROR_LINE.match(line.text) for line in after[start:]):
        return []
    return list(after[start:])


def _first(pattern: Lazy, lines: Sequence[Line]) -> tuple[Line, re.Match[str]] | None:
    for line in lines:
        match = pattern.search(line.text)
        if match:
            return line, match
    return None


def _deepest(
    patterns: Sequence[Lazy], traceback: Sequence[Line]
) -> tuple[int, Line, re.Match[str]] | None:
    """The frame nearest to the error that any of ``patterns`` finds."""
    for depth, line in enumerate(traceback):
        for pattern in patterns:
            match = pattern.search(line.text)
            if match:
                return depth, line, match
    return None


def _fill(groups: dict[str, str], match: re.Match[str]) -> None:
    for name, value in match.groupdict().items():
        if value and name not in groups:
            groups[name] = value.strip()


def _speaks(rule: Compiled, scanned: Scanned, line: Line, text: str) -> Hit | None:
    found, loose = None, False
    for pattern in rule.match:
        if found and pattern.loose:
            continue
        told = pattern.search(text)
        if told:
            found, loose = told, pattern.loose and not rule.near and not rule.frames
            if not loose:
                break
    if found is None:
        return None
    groups: dict[str, str] = {}
    _fill(groups, found)
    evidence = [line]
    depth = None
    if rule.near or rule.frames or rule.unless:
        window = around(scanned.lines, line.position)
        if any(_first(pattern, window.lines) for pattern in rule.unless):
            return None
        stepped = rule.rule.after_progress and 0 < scanned.first_progress < line.number
        for pattern in () if stepped else rule.near:
            near = _first(pattern, window.lines)
            if near is None:
                return None
            evidence.append(near[0])
            _fill(groups, near[1])
        if rule.frames:
            deepest = _deepest(rule.frames, window.traceback)
            if deepest is None:
                return None
            depth, frame, told = deepest
            evidence.append(frame)
            _fill(groups, told)
    unique = {one.position: one for one in evidence}
    return Hit(
        rule=rule.rule,
        line=line,
        groups=groups,
        evidence=tuple(unique[position] for position in sorted(unique)),
        last=scanned.last_seen.get(line.key, line.number),
        depth=depth,
        loose=loose,
    )


def hits(scanned: Scanned) -> list[Hit]:
    """Every rule that speaks, on every hot line, in the log's order.

    A report pasted from a terminal may be wrapped: where no rule speaks on any line, each is
    read together with the two that follow, and at last with the other kind of quotes.
    """
    code = code_lines(scanned.lines)

    def plain(position: int) -> str:
        return scanned.lines[position].text

    # A truncated traceback may end in the statement that raises, and hold no error line.
    notebook = {position for position in code if _NOTEBOOK.match(plain(position))}
    weak: list[Hit] = []
    for skipped in (code, notebook) if code else (code,):
        found = list(_hits(scanned, skipped, plain))
        if not all(hit.rule.fallback for hit in found):
            return found
        weak = weak or found
    if sum(line.hot for line in scanned.lines) > _PASTED:
        return weak
    readings = [partial(_unwrapped, scanned.lines, joint) for joint in (" ", "")]
    for reading in (*readings, partial(_other_quotes, scanned.lines)):
        found = list(_hits(scanned, code, reading))
        if not all(hit.rule.fallback for hit in found):
            return found
        weak = weak or found
    return weak


def _other_quotes(lines: Sequence[Line], position: int) -> str:
    return lines[position].text.replace('"', "'")


def _unwrapped(lines: Sequence[Line], joint: str, position: int) -> str:
    return joint.join(line.text.strip() for line in lines[position : position + 3])


@lru_cache(maxsize=1)
def _by_literal() -> tuple[tuple[int, ...], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Rules that any line may match, and the others by the text that a line must hold."""
    always: set[int] = set()
    needed: dict[str, list[int]] = {}
    for number, rule in enumerate(compiled()):
        for pattern in rule.match:
            if pattern.needed:
                needed.setdefault(pattern.needed, []).append(number)
            else:
                always.add(number)
    return tuple(always), tuple((text, tuple(found)) for text, found in needed.items())


def _worth_trying(text: str) -> list[Compiled]:
    always, needed = _by_literal()
    numbers = {number for literal_, found in needed if literal_ in text for number in found}
    every = compiled()
    return [every[number] for number in sorted(numbers.union(always))]


def _hits(scanned: Scanned, code: set[int], text_of: Callable[[int], str]) -> Iterator[Hit]:
    times: dict[str, int] = {}
    for line in scanned.lines:
        if not line.hot:
            continue
        text = text_of(line.position)
        for rule in _worth_trying(text):
            if times.get(rule.rule.id, 0) >= _HITS:
                continue
            if line.position in code and not rule.rule.code:
                continue
            hit = _speaks(rule, scanned, line, text)
            if hit:
                times[rule.rule.id] = times.get(rule.rule.id, 0) + 1
                yield hit


def code_lines(lines: Sequence[Line]) -> set[int]:
    """Positions of the source lines in tracebacks: ``raise X("...")`` is no error message."""
    code: set[int] = set()
    block: dict[str, int | None] = {}
    for line in lines:
        indent = len(line.text) - len(line.text.lstrip())
        inside = block.get(line.source)
        if _FRAME.match(line.text):
            block[line.source] = indent + 1
            continue
        if inside is not None and indent >= inside and line.text.strip():
            if _ERROR_LINE.match(line.text):
                continue
            code.add(line.position)
            continue
        block[line.source] = None
        if _NOTEBOOK.match(line.text) or _WARN_CALL.match(line.text):
            code.add(line.position)
    return code
