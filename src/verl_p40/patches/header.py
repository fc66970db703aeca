"""The header of a patch: DEP-3 fields (https://dep-team.pages.debian.net/deps/dep3/) and ours.

A header is a block of ``Field: value`` lines before the diff; a line that starts with a space
goes on the field above it, and a lone `` .`` is an empty line, as in Debian control files. The
block ends at a line ``---``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

REQUIRED = (
    "Description",
    "Author",
    "Forwarded",
    "Last-Update",
    "Applies-To",
    "Prevents",
    "Proved-By",
)
"""Fields that every patch has. The last two are ours: the error a user meets without the
patch, and the pytest node id of the test that fails without it."""

OPTIONAL = ("Origin", "Bug", "Depends")
"""``Depends`` names the patches of the same queue without which this one cannot apply."""

_FIELD = re.compile(r"^([A-Za-z][A-Za-z0-9-]*):(?: (.*))?$")


@dataclass(frozen=True)
class Header:
    """The parsed header. ``problems`` holds what a lint has to say about its form."""

    fields: Mapping[str, str]
    problems: tuple[str, ...] = field(default=())

    def get(self, name: str) -> str:
        """The value of a field, ``""`` when it is absent."""
        return self.fields.get(name, "")

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return self.get("Description").split("\n", 1)[0]

    @property
    def depends(self) -> tuple[str, ...]:
        """The names of the patches this one needs, without group and number."""
        parts = (part.strip() for part in self.get("Depends").split(","))
        return tuple(bare_name(part) for part in parts if part)


def bare_name(name: str) -> str:
    """``p40/0201-compute-dtype.patch`` -> ``compute-dtype``: what survives a renumbering."""
    return re.sub(r"^\d{4}-", "", name.rpartition("/")[2].removesuffix(".patch"))


def parse_header(text: str) -> Header:
    """Parse the lines before ``---``; never raises, what is odd ends up in ``problems``."""
    fields: dict[str, str] = {}
    problems: list[str] = []
    current = ""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if not line:
            problems.append(f"line {number} is empty (an empty line of a field is ' .')")
            continue
        if line != line.rstrip():
            problems.append(f"line {number} ends in blanks")
        if line[0] == " ":
            if not current:
                problems.append(f"line {number} continues no field")
                continue
            fields[current] += "\n" + ("" if line.strip() == "." else line[1:])
            continue
        match = _FIELD.match(line)
        if match is None:
            problems.append(f"line {number} is neither 'Field: value' nor indented: {line!r}")
            current = ""
            continue
        current = match.group(1)
        if current in fields:
            problems.append(f"field {current} appears twice")
        fields[current] = match.group(2) or ""
    return Header({name: value.strip() for name, value in fields.items()}, tuple(problems))
