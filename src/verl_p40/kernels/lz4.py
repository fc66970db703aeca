"""LZ4 block decompression, for the start of a compressed cubin or PTX text.

In pure Python: only symbol names are wanted, and they stand in the first kilobytes.
Source: the LZ4 block format description (lz4.org, ``lz4_Block_format.md``).
"""

from __future__ import annotations

from verl_p40.kernels.view import Damaged

_MIN_MATCH = 4


def decompress(source: bytes, limit: int) -> bytes:
    """The first ``limit`` bytes (or all) of an LZ4 block.

    Raises:
        Damaged: a sequence reaches outside of the block or of what was produced.
    """
    out = bytearray()
    position, end = 0, len(source)

    def length(position: int, value: int) -> tuple[int, int]:
        if value == 15:
            while True:
                byte = source[position]
                position += 1
                value += byte
                if byte != 255:
                    break
        return position, value

    try:
        while position < end and len(out) < limit:
            token = source[position]
            position, literals = length(position + 1, token >> 4)
            if position + literals > end:
                raise Damaged(f"LZ4: {literals} literals at byte {position} of {end}")
            out += source[position : position + literals]
            position += literals
            if position >= end:  # the last sequence is literals alone
                break
            distance = source[position] | source[position + 1] << 8
            position, match = length(position + 2, token & 15)
            match += _MIN_MATCH
            start = len(out) - distance
            if distance == 0 or start < 0:
                raise Damaged(f"LZ4: a match {distance} bytes back at output byte {len(out)}")
            if distance >= match:
                out += out[start : start + match]
            else:  # overlapping: the last `distance` bytes repeat
                pattern = bytes(out[start:])
                out += (pattern * (match // distance + 1))[:match]
    except IndexError:
        raise Damaged(f"LZ4: the block ends inside a sequence, at byte {end}") from None
    return bytes(out[:limit])
