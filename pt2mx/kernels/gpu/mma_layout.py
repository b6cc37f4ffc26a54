"""The MMA layout of packed weights: codes, and the bits within words, in the order of the tensor cores' operands.

A warp multiplies tiles of 16 rows. Of a tile, thread 4 * g + t of PTX's `mma.m16n8k16` (PTX ISA, "Matrix Fragments for
mma.m16n8k16") holds rows g and g + 8. The order of the values along K is free as long as x has the same one, so each
thread takes `Fragment.values` consecutive values. Each load of a warp reads 512 consecutive bytes. Marlin (Frantar et
al., 2024) reorders INT4 weights in this way.

Codes that the GPU converts by an instruction stay bytes. The bits of other codes are spread over words, so that a mask,
and for some a shift, extracts a pair of bfloat16 with the same sign, exponent field and mantissa. Such a bfloat16 is
the value times a power of two, subnormals included (`exponent_shift`). `_BITS` draws where each bit goes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.kernels.elements import decode
from pt2mx.kernels.packing import pad_axis, unpack

ROWS = 16  # of a tile
_K_THREADS = 4  # threads of a warp that share a row
_BF16_BIAS, _BF16_MANTISSA_BITS = 127, 7

#: elements whose bytes `mma_decode` converts by instructions
CONVERTED = ("fp8_e4m3", "fp8_e5m2", "int8", "int8_full")

#: element -> the words of a group, one a row: what bits 15 to 0 of each half of a word hold. "s2" is the sign of pair
#: 2, "e2" and "m2" are bits of its exponent and mantissa, the highest first; the low half holds the first of the two
#: values. Pairs whose bits are in the order of a bfloat16 take one mask each; the other pairs take the remaining bits.
_BITS = {
    "fp4_e2m1": """
        s0 s6 s7 s1 e6 e6 s2 e0 e0 m0 e1 e1 m1 e2 e2 m2
        s3 e7 e7 s4 m7 m6 s5 e3 e3 m3 e4 e4 m4 e5 e5 m5""",
    "fp6_e3m2": """
        s0 e6 e6 e6 m6 s1 e0 e0 e0 m0 m0 e1 e1 e1 m1 m1
        s2 e7 e7 e7 m7 s3 e2 e2 e2 m2 m2 e3 e3 e3 m3 m3
        s4 s6 m6 s7 m7 s5 e4 e4 e4 m4 m4 e5 e5 e5 m5 m5""",
    "fp6_e2m3": """
        s0 s3 e3 e3 m3 m3 m3 e0 e0 m0 m0 m0 e6 e6 m6 m6
        s1 s4 e4 e4 m4 m4 m4 e1 e1 m1 m1 m1 e7 e7 m7 m7
        s2 s5 e5 e5 m5 m5 m5 e2 e2 m2 m2 m2 s6 m6 s7 m7""",
}


class Piece(NamedTuple):
    """The bits `mask` of both halves of a pair: the bits of a word, shifted left."""

    word: int
    left: int
    mask: int


class Fragment(NamedTuple):
    """The part of a row that one thread holds at a time: `values` codes in `words` of 32 bits, with `scales` scales.

    `pairs`: if the bits are spread, the pieces of each pair of values of a group; the low half is the first value.
    """

    values: int
    words: int
    scales: int
    pairs: tuple[tuple[Piece, ...], ...] = ()

    @property
    def k_step(self) -> int:
        """Values along K that the threads of a warp hold at a time."""
        return _K_THREADS * self.values

    @property
    def group_words(self) -> int:
        """Words that hold whole pairs together."""
        return 1 + max(piece.word for pieces in self.pairs for piece in pieces)


def _fragment(element: ElementFormat) -> Fragment:
    values = 64 if element.bits == 6 else 32  # as few as fill whole vectors of four words
    pairs = () if element.name in CONVERTED else _pairs(element)
    return Fragment(values, values * element.bits // 32, values // 32, pairs)


def _pairs(element: ElementFormat) -> tuple[tuple[Piece, ...], ...]:
    """Read the drawing of an element: each bit goes to its position in a bfloat16."""
    rows = (
        [row.split() for row in _BITS[element.name].splitlines() if row] if element.bits < 8 else [_byte_bits(element)]
    )
    positions: dict[int, list[tuple[int, int]]] = {}  # pair -> word and bit of its sign, then of exponent and mantissa
    for word, row in enumerate(rows):
        for bit, name in zip(range(15, -1, -1), row, strict=True):
            bits = positions.setdefault(int(name[1:]), [])
            bits.insert(0 if name[0] == "s" else len(bits), (word, bit))
    top = _BF16_MANTISSA_BITS + element.bits - 2 - element.mantissa_bits
    pairs = []
    for _, bits in sorted(positions.items()):
        masks: dict[tuple[int, int], int] = {}
        for (word, bit), target in zip(bits, (15, *range(top, -1, -1)), strict=False):
            masks[word, target - bit] = masks.get((word, target - bit), 0) | 1 << target
        pairs.append(tuple(Piece(word, left, mask) for (word, left), mask in masks.items()))
    return tuple(pairs)


def _byte_bits(element: ElementFormat) -> list[str]:
    """Return the drawing of an 8-bit element: pair 0 in place, and the bits of pair 1 around it."""
    m = element.mantissa_bits
    return ["s0", "s1", *["e1"] * m, *["e0"] * 7, *["m1"] * (7 - m)]


#: element -> fragment
FRAGMENTS = {name: _fragment(e) for name, e in ELEMENTS.items() if name in _BITS or e.bits == 8}


def exponent_shift(element: ElementFormat) -> int:
    """Return log2 of the factor that turns the spread pairs of an element into its values."""
    return _BF16_BIAS - element.bias if FRAGMENTS[element.name].pairs else 0


_ROWS_AT_A_TIME = 256 * ROWS  # temporaries hold codes as integers of 8 bytes


def to_mma_layout(
    codes: Tensor, scale: Tensor, element: ElementFormat, block_size: int
) -> tuple[Tensor, Tensor] | None:
    """Reorder the packed codes and the scales of a weight into the MMA layout.

    Args:
        codes, scale: (N, bytes), (N, ceil(K / block_size)) uint8, of a K that 8 divides.

    Returns:
        (n_tiles, k_steps, 2, words / 4, 32, 16) and (n_tiles, k_steps, 2, scales, 32) uint8: the vectors of 16 bytes of
        each thread, for rows g and g + 8, and its scales; the last tile and step are filled with zeros. None if
        products could be inexact: for another format, a NaN, an infinity, a block size that 32 does not divide, or a
        scale so large that bfloat16 cannot represent it times two to the `exponent_shift`.
    """
    fragment = FRAGMENTS.get(element.name)
    if fragment is None or block_size % 32 or codes.dim() != 2 or not codes.numel():
        return None
    parts = []
    for rows in zip(codes.split(_ROWS_AT_A_TIME), scale.split(_ROWS_AT_A_TIME), strict=True):
        part = _rows_to_mma_layout(*rows, element, block_size)
        if part is None:
            return None
        parts.append(part)
    words, scales = zip(*parts, strict=True)
    return torch.cat(words), torch.cat(scales)


def _rows_to_mma_layout(
    packed: Tensor, scale: Tensor, element: ElementFormat, block_size: int
) -> tuple[Tensor, Tensor] | None:
    fragment = FRAGMENTS[element.name]
    codes = unpack(packed, 1, element.bits)  # (N, K') int32
    magnitude = codes & (1 << (element.bits - 1)) - 1
    scale = scale.repeat_interleave(block_size // 32, 1)[:, : -(-codes.shape[1] // 32)].to(torch.int32)
    blocks = pad_axis(codes if element.is_int else magnitude, 1, 32).unflatten(1, (-1, 32))
    lost = (scale == 0) & blocks.any(2) if not fragment.pairs else scale.new_zeros((), dtype=torch.bool)
    special = magnitude > element.max_code if element.has_nan or element.has_inf else lost
    if bool((scale > 254 - exponent_shift(element)).any() | lost.any() | special.any()):
        return None
    codes = pad_axis(pad_axis(codes, 0, ROWS), 1, fragment.k_step)
    scale = pad_axis(pad_axis(scale, 0, ROWS), 1, _K_THREADS * fragment.scales)
    words = _spread(codes, fragment, element) if fragment.pairs else codes.to(torch.uint8).view(torch.int32)
    words = words.view(-1, 2, 8, codes.shape[1] // fragment.k_step, _K_THREADS, fragment.words // 4, 4)
    words = words.permute(0, 3, 1, 5, 2, 4, 6)  # (n_tiles, k_steps, 2, vectors, 8, 4, 4)
    scale = scale.view(-1, 2, 8, codes.shape[1] // fragment.k_step, _K_THREADS, fragment.scales)
    scale = scale.permute(0, 3, 1, 5, 2, 4).to(torch.uint8)
    return words.contiguous().view(torch.uint8).flatten(4, 5), scale.flatten(4, 5).contiguous()


def from_mma_layout(codes: Tensor, scale: Tensor, element: ElementFormat, n: int, k: int) -> Tensor:
    """Return the weight that `to_mma_layout` reordered, (n, k) bfloat16. It defines the layout for the kernels."""
    fragment, (n_tiles, k_steps) = FRAGMENTS[element.name], codes.shape[:2]
    words = codes.view(torch.int32).view(n_tiles, k_steps, 2, fragment.words // 4, 8, _K_THREADS, 4)
    words = words.permute(0, 2, 4, 1, 5, 3, 6).reshape(n_tiles * ROWS, -1)  # (N, K * bits / 32)
    scale = scale.view(n_tiles, k_steps, 2, fragment.scales, 8, _K_THREADS).permute(0, 2, 4, 1, 5, 3)
    scale = scale.reshape(n_tiles * ROWS, -1).to(torch.int32) + exponent_shift(element)  # (N, K / 32)
    if fragment.pairs:
        values = gather_bits(words, fragment).view(torch.bfloat16).to(torch.float32)
    else:
        values = decode(words.view(torch.uint8).to(torch.int32), element)
    factors = torch.where(scale == 0, 0.0, (scale << 23).view(torch.float32))
    return (values.unflatten(1, (-1, 32)) * factors[..., None]).flatten(1)[:n, :k].to(torch.bfloat16)


def gather_bits(words: Tensor, fragment: Fragment) -> Tensor:
    """words: (N, K * bits / 32) int32 -> the bits of bfloat16, (N, K) int16."""
    words = words.to(torch.int64).unflatten(1, (-1, fragment.group_words))
    halves = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)  # (N, groups, words, 2)
    pairs = []
    for pieces in fragment.pairs:
        bits = halves.new_zeros(())
        for word, left, mask in pieces:
            half = halves[:, :, word]
            bits = bits | (half << left if left > 0 else half >> -left) & mask
        pairs.append(bits)
    bits = torch.stack(pairs, 2).flatten(1)
    return torch.where(bits < 1 << 15, bits, bits - (1 << 16)).to(torch.int16)


def _spread(codes: Tensor, fragment: Fragment, element: ElementFormat) -> Tensor:
    """codes: (N, K) int32 -> (N, K * bits / 32) int32."""
    last = _BF16_MANTISSA_BITS - element.mantissa_bits
    magnitude, sign = codes & (1 << (element.bits - 1)) - 1, codes >> (element.bits - 1)
    pairs = (magnitude << last | sign << 15).to(torch.int64).unflatten(1, (-1, len(fragment.pairs), 2))
    words = pairs.new_zeros((*pairs.shape[:2], fragment.group_words, 2))
    for i, pieces in enumerate(fragment.pairs):
        for piece in pieces:
            bits = pairs[:, :, i] & piece.mask
            bits = bits >> piece.left if piece.left > 0 else bits << -piece.left
            words[:, :, piece.word] |= bits
    words = words[..., 0] | words[..., 1] << 16
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32).flatten(1)
