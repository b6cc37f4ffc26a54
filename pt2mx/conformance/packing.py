"""Orders of codes in bytes (PACKINGS). The specification leaves the layout of a block in memory open (section 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pt2mx.formats import ElementFormat

Bytes = NDArray[np.uint8]


class Packing(NamedTuple):
    """`pack` takes (codes (rows, n) uint8, bits of a code) and returns (rows, bytes) uint8; `unpack` is the inverse.

    `widths` are the bits of the codes that it packs; n fills whole bytes.
    """

    pack: Callable[[Bytes, int], Bytes]
    unpack: Callable[[Bytes, int], Bytes]
    widths: tuple[int, ...]


def _stream(order: Literal["little", "big"], widths: tuple[int, ...]) -> Packing:
    """Return the packing of codes as one stream of bits, which fills bytes from the low or the high bit."""

    def pack(codes: Bytes, bits: int) -> Bytes:
        each = np.unpackbits(codes[..., None], axis=-1, bitorder=order)
        each = each[..., :bits] if order == "little" else each[..., 8 - bits :]
        return np.packbits(each.reshape(len(codes), -1), axis=-1, bitorder=order)

    def unpack(data: Bytes, bits: int) -> Bytes:
        stream = np.unpackbits(data, axis=-1, bitorder=order)
        each = stream[:, : stream.shape[1] // bits * bits].reshape(len(data), -1, bits)
        padding = [(0, 0), (0, 0), (0, 8 - bits) if order == "little" else (8 - bits, 0)]
        return np.packbits(np.pad(each, padding), axis=-1, bitorder=order)[..., 0]

    return Packing(pack, unpack, widths)


def _pack_halves(codes: Bytes, bits: int) -> Bytes:
    first, second = np.split(codes.reshape(len(codes), -1, 32), 2, axis=-1)
    return (first | second << np.uint8(4)).reshape(len(codes), -1)


def _unpack_halves(data: Bytes, bits: int) -> Bytes:
    each = data.reshape(len(data), -1, 16)
    return np.concatenate([each & 15, each >> 4], axis=-1).reshape(len(data), -1)


#: name -> the packing
PACKINGS: dict[str, Packing] = {
    # the first code in the low bits
    "low_first": _stream("little", (4, 6, 8)),
    # the first code in the high bits
    "high_first": _stream("big", (4, 6)),
    # of a block of 32 the first 16 codes in the low nibbles, the others in the high nibbles: GGUF
    "halves": Packing(_pack_halves, _unpack_halves, (4,)),
    # a byte for each code
    "bytes": Packing(lambda codes, bits: codes, lambda data, bits: data, (4, 6)),
}


def packings(element: ElementFormat) -> tuple[str, ...]:
    """Return the names of the packings of an element's codes."""
    return tuple(name for name, packing in PACKINGS.items() if element.bits in packing.widths)
