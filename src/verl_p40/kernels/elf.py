"""The parts of ELF that hold GPU code: sections of a host file, and the cubin, which is ELF too.

Source: the ELF-64 object file format; ``EM_CUDA`` (190) is registered there. What a cubin's
header flags mean is not published: they were read from cubins of known architecture, CUDA 11.7
to 12.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl_p40.kernels.view import Damaged, View

MAGIC = b"\x7fELF"
EM_CUDA = 190
_SHT_NOBITS = 8
_STRINGS_AT = 64
"""Where ``.shstrtab`` starts in every cubin that ptxas writes: after the ELF-64 header."""


@dataclass(frozen=True)
class Section:
    """A section with content in the file; ``offset`` and ``size`` in bytes."""

    name: str
    offset: int
    size: int


def is_64bit(view: View) -> bool:
    """Whether this is a little-endian ELF-64 file: what every CUDA platform uses."""
    return view.read(0, 6) == MAGIC + b"\x02\x01"


def machine(view: View) -> int:
    """``e_machine``."""
    return int(view.unpack("<H", 18, "ELF header")[0])


def sections(view: View) -> Iterator[Section]:
    """The sections that have content.

    Raises:
        Damaged: the section table or a section reaches beyond the file.
    """
    segments, table = view.unpack("<QQ", 32, "ELF header")
    size, number = view.unpack("<HH", 54, "ELF header")
    view.sub(segments, size * number, "ELF program headers")
    entry, count, names_index = view.unpack("<HHH", 58, "ELF header")
    if not table:
        return
    if entry < 64:
        raise Damaged(f"ELF section header of {entry} bytes")
    if count == 0:  # more than 65,279 of them: the real counts are in the first header
        count = int(view.unpack("<Q", table + 32, "ELF section table")[0])
        if names_index == 0xFFFF:
            names_index = int(view.unpack("<I", table + 40, "ELF section table")[0])
    headers = view.sub(table, entry * count, "ELF section table")
    found = []
    for index in range(count):
        name, kind, _, _, offset, size = headers.unpack("<IIQQQQ", index * entry, "ELF section")
        found.append((name, kind, offset, size))
    if names_index >= len(found):
        raise Damaged(f"ELF section names are in section {names_index} of {len(found)}")
    _, _, offset, size = found[names_index]
    names = view.sub(offset, size, "ELF section names")
    for name, kind, offset, size in found:
        if kind in (0, _SHT_NOBITS):
            continue
        text = names.text(name, "ELF section name")
        view.sub(offset, size, f"section {text}")
        yield Section(text, offset, size)


def cubin_arch(head: bytes) -> int | None:
    """The SM number (61 for sm_61) in a cubin's ELF header; None if this is no cubin.

    ABI version 7 (CUDA 11 and 12) has it in the lowest byte of ``e_flags``; 8, which is used for
    sm_100 and later, in the second.
    """
    if len(head) < 64 or head[:4] != MAGIC or int.from_bytes(head[18:20], "little") != EM_CUDA:
        return None
    flags = int.from_bytes(head[48:52], "little")
    return (flags >> 8 if head[8] >= 8 else flags) & 0xFF


def cubin_kernels(head: bytes) -> tuple[list[str], bool]:
    """The kernels named in the first bytes of a cubin, and whether those bytes hold all names.

    Every kernel has a constant bank 0 for its arguments, ``.nv.constant0.<kernel>``; a device
    function has none. ptxas writes the section names directly behind the header, so that the rest
    of a compressed cubin need not be unpacked: all were seen when as much again has none.
    """
    kernels = set()
    after = _STRINGS_AT
    for match in re.finditer(rb"\0\.(?:nv|text|rel|rela)\.([^\0]+)", head):
        after = match.end()
        name = match[1]
        if name.startswith(b"constant0."):
            kernels.add(name.removeprefix(b"constant0.").decode("utf-8", "replace"))
    return sorted(kernels), after * 2 < len(head)
