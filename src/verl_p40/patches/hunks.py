"""Parsing a unified diff into byte-exact hunks, and applying them to the lines of one file.

Lines are ``bytes`` with their terminator, split at ``\\n`` alone as git does, so that CRLF files
and files without a final newline come out exactly as the patch says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Literal

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchSet

Lines = tuple[bytes, ...]

MAX_FUZZ = 2
"""Context lines that may be ignored at either end of a hunk, the default of GNU patch."""


class Fit(IntEnum):
    """How a hunk, a file or a patch fits the text it is applied to, best first."""

    EXACT = 0
    """At the stated line, every context line equal."""
    OFFSET = 1
    """Every context line equal, at another line."""
    UPSTREAM = 2
    """The text already reads as it would after the hunk."""
    PARTLY = 3
    """Of several hunks, some are already there and some are not."""
    FUZZ = 4
    """Only with up to :data:`MAX_FUZZ` context lines ignored at an end."""
    CONFLICT = 5
    """Nowhere."""


@dataclass(frozen=True)
class Hunk:
    """One ``@@`` block. Positions are zero-based indexes into the lines of the old file."""

    index: int
    old: Lines
    new: Lines
    leading: int
    """How many of the first lines are context."""
    trailing: int
    """How many of the last lines are context."""

    def trimmed(self, fuzz: int) -> Hunk | None:
        """The hunk without its outermost ``fuzz`` context lines; None if it has too few."""
        front, back = min(fuzz, self.leading), min(fuzz, self.trailing)
        if front + back == 0 or max(self.leading, self.trailing) < fuzz:
            return None
        return Hunk(
            index=self.index + front,
            old=self.old[front : len(self.old) - back],
            new=self.new[front : len(self.new) - back],
            leading=self.leading - front,
            trailing=self.trailing - back,
        )


@dataclass(frozen=True)
class FilePatch:
    """What a patch does to one file; ``path`` is relative to the folder of the tree."""

    path: str
    action: Literal["modify", "add", "delete"]
    hunks: tuple[Hunk, ...]

    @property
    def added_text(self) -> bytes:
        """The whole content of a file that the patch adds."""
        return b"".join(line for hunk in self.hunks for line in hunk.new)


@dataclass(frozen=True)
class HunkFit:
    """How one hunk (``number`` counts from 1 within its file) fitted."""

    number: int
    fit: Fit
    offset: int = 0
    """Lines between the stated and the real place."""
    fuzz: int = 0


@dataclass(frozen=True)
class FileFit:
    """How all hunks of one file fitted. ``reason`` says why when no hunk could be tried."""

    path: str
    fit: Fit
    hunks: tuple[HunkFit, ...] = ()
    reason: str = ""

    def describe(self) -> str:
        """One line a person can act on: the file and each hunk that is not exact."""
        if self.reason:
            return f"{self.path}: {self.reason}"
        words = {
            Fit.OFFSET: lambda h: f"hunk {h.number} {h.offset:+d} lines off",
            Fit.FUZZ: lambda h: f"hunk {h.number} needs fuzz {h.fuzz} ({h.offset:+d} lines off)",
            Fit.UPSTREAM: lambda h: f"hunk {h.number} already there",
            Fit.CONFLICT: lambda h: f"hunk {h.number} of {len(self.hunks)} does not apply",
        }
        parts = [words[hunk.fit](hunk) for hunk in self.hunks if hunk.fit in words]
        return f"{self.path}: {', '.join(parts)}" if parts else self.path


def split_lines(data: bytes) -> list[bytes]:
    """Split after each ``\\n``, keeping it; the last line may lack one."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def parse_diff(diff: bytes, *roots: str) -> tuple[FilePatch, ...]:
    """Parse the diff part of a patch file.

    Args:
        diff: the bytes from the first ``diff --git`` or ``--- `` line on.
        roots: the top-level names that may be touched, e.g. ``verl``.

    Raises:
        ValueError: with one line saying what is wrong (malformed, binary, renaming, changing a
            mode, outside ``roots``, one file twice, no change at all).
    """
    try:
        # Latin-1 maps each byte to one character and back: unidiff works on text, we need bytes.
        parsed = PatchSet(diff.decode("latin-1"))
    except UnidiffParseError as error:
        raise ValueError(f"malformed diff: {error}".strip()) from None
    files: list[FilePatch] = []
    for item in parsed:
        if item.is_binary_file:
            raise ValueError(f"{item.path}: binary changes are not supported")
        if item.is_rename:
            raise ValueError(f"{item.path}: renames are not supported (delete and add instead)")
        adds, deletes = item.source_file == "/dev/null", item.target_file == "/dev/null"
        named = item.target_file if adds else item.source_file
        path = _checked_path(named, roots)
        info: list[str] = item.patch_info or []
        if any(line.startswith(("old mode ", "new mode ")) for line in info):
            raise ValueError(f"{path}: mode changes are not supported")
        if any(line.startswith("new file mode ") and "100644" not in line for line in info):
            raise ValueError(f"{path}: only plain files (mode 100644) can be added")
        hunks = tuple(_hunk(hunk) for hunk in item)
        if not hunks and not (adds or deletes):
            raise ValueError(f"{path}: no hunk")
        if any(path == other.path for other in files):
            raise ValueError(f"{path}: appears twice")
        files.append(FilePatch(path, "add" if adds else "delete" if deletes else "modify", hunks))
    if not files:
        raise ValueError("no diff found")
    return tuple(files)


def _checked_path(named: str, roots: tuple[str, ...]) -> str:
    path = PurePosixPath(named[2:] if named[:2] in ("a/", "b/") else named)
    if path.is_absolute() or ".." in path.parts or not path.parts or str(path) == roots[0]:
        raise ValueError(f"{named}: not a path below a/{roots[0]}/")
    if path.parts[0] not in roots:
        raise ValueError(f"{named}: outside {'/, '.join(roots)}/")
    return str(path)


def _hunk(parsed: ParsedHunk) -> Hunk:
    old: list[bytes] = []
    new: list[bytes] = []
    kinds: list[str] = []
    last = ""
    for line in parsed:
        kind, value = str(line.line_type), str(line.value).encode("latin-1")
        if kind == "\\":
            # "No newline at end of file" speaks of the line just above it.
            for side, sign in ((old, "-"), (new, "+")):
                if last in (" ", sign):
                    side[-1] = side[-1].removesuffix(b"\n")
            continue
        if kind not in (" ", "+", "-"):
            continue
        if kind != "+":
            old.append(value)
        if kind != "-":
            new.append(value)
        kinds.append(kind)
        last = kind
    changes = [position for position, kind in enumerate(kinds) if kind != " "]
    if not changes:
        raise ValueError("a hunk changes nothing")
    start, length = parsed.source_start, parsed.source_length
    return Hunk(
        # With no old line, the header names the line after which to insert.
        index=start if length == 0 else start - 1,
        old=tuple(old),
        new=tuple(new),
        leading=changes[0],
        trailing=len(kinds) - 1 - changes[-1],
    )


def combine(fits: Iterable[Fit]) -> Fit:
    """The verdict on a whole from those on its parts: the worst, or PARTLY (see there)."""
    parts = set(fits)
    worst = max(parts, default=Fit.EXACT)
    return Fit.PARTLY if worst is Fit.UPSTREAM and len(parts) > 1 else worst


def apply_hunks(
    lines: Sequence[bytes], hunks: Sequence[Hunk]
) -> tuple[list[bytes], tuple[HunkFit, ...]]:
    """Apply every hunk that fits somehow, in order, and leave the others out.

    The caller decides from the returned fits which result is good enough to keep.

    Returns:
        The new lines and one :class:`HunkFit` a hunk.
    """
    result: list[bytes] = []
    fits: list[HunkFit] = []
    done = 0  # old lines already copied
    drift = 0  # offset of the last placed hunk: the next one is likely off by the same
    for number, hunk in enumerate(hunks, start=1):
        placed, place, fit, fuzz = _place(lines, hunk, done, drift)
        if fit is Fit.CONFLICT:
            fits.append(HunkFit(number, fit))
            continue
        drift = place - placed.index
        if fit is not Fit.UPSTREAM:
            result += lines[done:place]
            result += placed.new
            done = place + len(placed.old)
        fits.append(HunkFit(number, fit, drift, fuzz))
    result += lines[done:]
    return result, tuple(fits)


def _place(
    lines: Sequence[bytes], hunk: Hunk, floor: int, drift: int
) -> tuple[Hunk, int, Fit, int]:
    if not hunk.old:
        # Nothing to compare with: right for an empty file alone.
        return hunk, 0, Fit.CONFLICT if lines else Fit.EXACT, 0
    # Around the place that the hunk before suggests, even if the stated one matches as well:
    # text repeats, and this one is as far off as that one was.
    place = _nearest(lines, hunk.old, hunk.index + drift, floor)
    if place is not None:
        return hunk, place, Fit.EXACT if place == hunk.index else Fit.OFFSET, 0
    # Before fuzz: a fuzzy fit would insert a second time what is already there.
    place = _nearest(lines, hunk.new, hunk.index + drift, floor)
    if place is not None:
        return hunk, place, Fit.UPSTREAM, 0
    for fuzz in range(1, MAX_FUZZ + 1):
        shorter = hunk.trimmed(fuzz)
        if shorter is None or not shorter.old:
            break
        place = _nearest(lines, shorter.old, shorter.index + drift, floor)
        if place is not None:
            return shorter, place, Fit.FUZZ, fuzz
    return hunk, hunk.index, Fit.CONFLICT, 0


def _matches(lines: Sequence[bytes], wanted: Lines, place: int) -> bool:
    return (
        0 <= place <= len(lines) - len(wanted)
        and tuple(lines[place : place + len(wanted)]) == wanted
    )


def _nearest(lines: Sequence[bytes], wanted: Lines, around: int, floor: int) -> int | None:
    if not wanted:
        return None
    places = [
        place
        for place in range(floor, len(lines) - len(wanted) + 1)
        if lines[place] == wanted[0] and _matches(lines, wanted, place)
    ]
    return min(places, key=lambda place: abs(place - around), default=None)
