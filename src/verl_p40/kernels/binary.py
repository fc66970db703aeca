"""The GPU code of one file: ELF objects, executables, libraries, archives, fatbins, cubins, PTX."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verl_p40.kernels import elf, fatbin
from verl_p40.kernels.fatbin import Entry, Kind, Module
from verl_p40.kernels.view import Damaged, View

REGISTERED = ".nv_fatbin"
RELOCATABLE = "__nv_relfatbin"
_SECTIONS = {REGISTERED: "registered", RELOCATABLE: "relocatable"}
_AR = b"!<arch>\n"
_AR_THIN = b"!<thin>\n"
_AR_HEADER = 60
_PE = b"MZ"
_CUBIN = elf.MAGIC + b"\x02\x01\x01"
_PTX = re.compile(rb"^\s*\.version\s+(\d+)\.(\d+)\s+\.target\s+(?:sm|compute)_(\d+)([af]?)", re.M)
_PTX_HEAD = 8192


def recognised(head: bytes) -> bool:
    """Whether the first bytes of a file are of a kind that can hold GPU code."""
    return head.startswith((elf.MAGIC, _AR, _AR_THIN, fatbin.MAGIC, _PE)) or is_ptx(head)


def is_ptx(head: bytes) -> bool:
    """Whether these first bytes are PTX text (comments, then ``.version``)."""
    return re.match(rb"(?:\s|//[^\n]*\n)*\.version\s+\d+\.\d+\s", head) is not None


def modules(view: View) -> Iterator[Module]:
    """Every module of GPU code in a file, in file order.

    Raises:
        Damaged: the file is cut off or contradicts its format.
    """
    head = view.read(0, _PTX_HEAD)
    if head.startswith(_AR_THIN):
        raise Damaged("a thin archive: it holds the names of object files, not their content")
    if head.startswith(_AR):
        for member in _members(view):
            if recognised(member.read(0, 64)):
                yield from modules(member)
    elif head.startswith(fatbin.MAGIC):
        yield from fatbin.walk(view, "registered")
    elif elf.is_64bit(view):
        yield from _elf_modules(view)
    elif is_ptx(head):
        yield _ptx_module(view)
    else:
        yield from fatbin.search(view, "registered")


def _elf_modules(view: View) -> Iterator[Module]:
    if elf.machine(view) == elf.EM_CUDA:
        for _ in elf.sections(view):  # a cubin that is cut off is found out here
            pass
        yield _cubin_module(view, "registered")
        return
    found = list(elf.sections(view))
    if not found:
        yield from fatbin.search(view)
    for section in found:
        inside = view.sub(section.offset, section.size, section.name)
        if place := _SECTIONS.get(section.name):
            yield from fatbin.walk(inside, place)
        else:
            yield from _embedded(inside)


def _embedded(view: View) -> Iterator[Module]:
    """Code in ordinary data: what a library loads by itself through the driver interface."""
    end = 0
    for module in fatbin.search(view):
        start = module.offset - view.start
        yield from _bare_cubins(view.sub(end, start - end, "gap"))
        end = module.entries[-1].payload.end - view.start
        yield module
    yield from _bare_cubins(view.sub(end, len(view) - end, "gap"))


def _bare_cubins(view: View) -> Iterator[Module]:
    position = view.find(_CUBIN)
    while position >= 0:
        if elf.cubin_arch(view.read(position, 64)) is not None:
            yield _cubin_module(View(view.data, view.start + position, view.end), "embedded")
        position = view.find(_CUBIN, position + len(_CUBIN))


def _cubin_module(view: View, place: str) -> Module:
    head = view.read(0, 64)
    sm = elf.cubin_arch(head)
    if sm is None:
        raise Damaged("cubin header is cut off")
    size = len(view)
    entry = Entry(Kind.CUBIN, sm, False, (1, 7), size, size, "", view)
    return Module(view.start, place, (entry,))


def _ptx_module(view: View) -> Module:
    match = _PTX.search(re.sub(rb"//[^\n]*", b"", view.read(0, _PTX_HEAD)))
    if not match:
        raise Damaged("PTX text without a .target in its head")
    version = (int(match[1]), int(match[2]))
    size = len(view)
    entry = Entry(Kind.PTX, int(match[3]), match[4] == b"a", version, size, size, "", view)
    return Module(view.start, "registered", (entry,))


def _members(view: View) -> Iterator[View]:
    """The files of an ``ar`` archive, each where it lies."""
    position = len(_AR)
    while position < len(view):
        header = view.read(position, _AR_HEADER)
        if len(header) < _AR_HEADER or header[58:60] != b"`\n":
            raise Damaged(f"archive member header at byte {position} is damaged")
        try:
            size = int(header[48:58])
        except ValueError:
            raise Damaged(f"archive member at byte {position} has no size") from None
        yield view.sub(position + _AR_HEADER, size, "archive member")
        position += _AR_HEADER + size + size % 2
