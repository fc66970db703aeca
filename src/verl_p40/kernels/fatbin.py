"""The container in which nvcc puts one translation unit's GPU code, compiled several times over.

NVIDIA documents the wrapper (``fatbinary_section.h``) and not the container. The layout here was
read from files of CUDA 11.7 to 12.8 and agrees with ``cuobjdump`` on every one of them
(docs/kernels.md): a 16-byte header (magic, version, header size, content size), then the entries,
each with a header of its own size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from verl_p40.kernels import elf, lz4
from verl_p40.kernels.view import Damaged, View

MAGIC = (0xBA55ED50).to_bytes(4, "little")
HEADER = 16
_ENTRY = "<HHIQIIHHI"
"""kind, version, header size, payload size, size before padding, option offset, code minor and
major version, SM number; flags and the unpacked size follow at fixed offsets."""
_SMALLEST_ENTRY = 64
_FLAG_LZ4 = 0x2000
_FLAG_ZSTD = 0x8000
_FLAG_SPECIFIC = 0x100000
"""Architecture-specific code: the ``a`` of ``sm_90a``."""
_FIRST_NAMES = 1 << 16


class Kind(Enum):
    """What an entry is. LTO: intermediate code for the device linker, which no driver runs."""

    PTX = 1
    CUBIN = 2
    LTO = 8
    OTHER = 0


_KINDS = {kind.value: kind for kind in Kind}
_CODE = frozenset({Kind.PTX, Kind.CUBIN})


@dataclass(frozen=True)
class Entry:
    """One architecture's code of a module.

    Attributes:
        sm: the SM number: 61 for ``sm_61`` and ``compute_61``.
        specific: runs on that architecture alone (``sm_90a``).
        code_version: of PTX, the ISA version that the driver must know.
        size: bytes in the file.
        unpacked: bytes after decompression.
        compression: ``""``, ``"lz4"`` or ``"zstd"``.
    """

    kind: Kind
    sm: int
    specific: bool
    code_version: tuple[int, int]
    size: int
    unpacked: int
    compression: str
    payload: View

    @property
    def is_code(self) -> bool:
        """Whether a driver can do something with it."""
        return self.kind in _CODE

    @property
    def target(self) -> str:
        """``sm_61``, ``compute_61``; as cuobjdump writes them."""
        prefix = {Kind.CUBIN: "sm_", Kind.PTX: "compute_", Kind.LTO: "lto_"}.get(
            self.kind, "unknown_"
        )
        return f"{prefix}{self.sm}{'a' if self.specific else ''}"

    def kernels(self) -> list[str]:
        """The mangled names of the kernels inside.

        Raises:
            Damaged: it does not decompress, or is compressed with zstd and Python has no reader.
        """
        if self.kind is Kind.CUBIN:
            limit = _FIRST_NAMES
            while True:
                names, complete = elf.cubin_kernels(self._head(limit))
                if complete or limit >= self.unpacked:
                    return names
                limit *= 4
        if self.kind is Kind.PTX:
            return ptx_kernels(self._head(self.unpacked))
        return []

    def _head(self, limit: int) -> bytes:
        limit = min(limit, self.unpacked)
        if not self.compression:
            return self.payload.read(0, limit)
        if self.compression == "lz4":
            return lz4.decompress(self.payload.read(), limit)
        return _zstd(self.payload.read(), limit)


def _zstd(data: bytes, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise Damaged("compressed with zstd: kernel names need `pip install zstandard`") from None
    return bytes(zstandard.ZstdDecompressor().decompressobj().decompress(data)[:limit])


def ptx_kernels(text: bytes) -> list[str]:
    """The names of the ``.entry`` functions of PTX text."""
    return sorted({name.decode() for name in re.findall(rb"\.entry\s+([\w$%]+)", text)})


@dataclass(frozen=True)
class Module:
    """A container: what is loaded, and found runnable or not, as one.

    Attributes:
        offset: where it starts, in bytes from the start of the file or archive member.
        place: ``registered`` (loaded by the CUDA runtime), ``relocatable`` (input of the device
            linker) or ``embedded`` (data that the library loads by itself when it likes).
    """

    offset: int
    place: str
    entries: tuple[Entry, ...]

    def kernels(self, entry: Entry | None = None) -> list[str]:
        """The kernels of one entry; by default of the largest one with code."""
        code = [e for e in self.entries if e.is_code]
        chosen = entry or max(code, key=lambda e: e.unpacked, default=None)
        return chosen.kernels() if chosen else []


def read(view: View, offset: int, place: str) -> tuple[Module, int]:
    """The container at ``offset`` and where it ends.

    Raises:
        Damaged: no container is there, or it contradicts itself.
    """
    what = f"fat binary at byte {view.start + offset}"
    magic, version, header, size = view.unpack("<4sHHQ", offset, what)
    if magic != MAGIC:
        raise Damaged(f"{what}: magic number {magic.hex()}")
    if header < HEADER or version not in (1, 2):
        raise Damaged(f"{what}: version {version}, header of {header} bytes")
    body = view.sub(offset + header, size, what)
    entries = tuple(_entries(body, what))
    return Module(view.start + offset, place, entries), offset + header + size


def _entries(body: View, what: str) -> Iterator[Entry]:
    position = 0
    while position < len(body):
        kind, _, header, padded, size, _, minor, major, sm = body.unpack(_ENTRY, position, what)
        if header < _SMALLEST_ENTRY or sm > 999:
            raise Damaged(f"{what}: entry at {position} has a header of {header} bytes, sm {sm}")
        flags, _, unpacked = body.unpack("<QQQ", position + 40, what)
        payload = body.sub(position + header, padded, f"{what}: an entry")
        compression = "lz4" if flags & _FLAG_LZ4 else "zstd" if flags & _FLAG_ZSTD else ""
        length = size if compression and 0 < size <= padded else padded
        yield Entry(
            kind=_KINDS.get(kind, Kind.OTHER),
            sm=sm,
            specific=bool(flags & _FLAG_SPECIFIC),
            code_version=(major, minor),
            size=padded,
            unpacked=unpacked if compression else padded,
            compression=compression,
            payload=payload.sub(0, length, what),
        )
        position += header + padded


def walk(view: View, place: str) -> Iterator[Module]:
    """The containers of a section that holds nothing else, in order.

    Raises:
        Damaged: something else than padding is between them.
    """
    position = 0
    while position < len(view):
        if view.read(position, 4) != MAGIC:
            found = view.find(MAGIC, position)
            gap = view.read(position, (found if found >= 0 else len(view)) - position)
            if gap.strip(b"\0"):
                raise Damaged(f"no fat binary at byte {view.start + position}, where one should be")
            if found < 0:
                return
            position = found
        module, position = read(view, position, place)
        yield module


def search(view: View, place: str = "embedded") -> Iterator[Module]:
    """The containers anywhere in ``view``; what only looks like one is passed over."""
    position = view.find(MAGIC)
    while position >= 0:
        try:
            module, after = read(view, position, place)
        except Damaged:
            after = position + len(MAGIC)
        else:
            if module.entries:
                yield module
        position = view.find(MAGIC, after)
