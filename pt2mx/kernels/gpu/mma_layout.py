"""The MMA layout of packed weights: codes, and the bits within words, in the order of the tensor cores' operands.

A warp multiplies tiles of 16 rows. Of a tile, thread 4 * g + t of PTX's `mma.m16n8k16` (PTX ISA, "Matrix Fragments for
mma.m16n8k16") holds rows g and g + 8. The order of the values along K is free as long as x has the same one, so each
thread takes `Fragment.values` consecutive values. Each load of a warp reads 512 consecutive bytes. Marlin (Frantar et
al., 2024) reorders INT4 weights in this way.

Codes that the GPU converts by an instruction stay bytes. The bits of other codes are spread over words, so that a mask,
and for some a shift, extracts a pair of bfloat16 with the same sign, exponent field and mantissa. Such a bfloat16 is
the value times a power of two, subnormals included (`exponent_shift`). `_BITS` draws where each bit goes.

A scale with a significand becomes a byte of 5 exponent bits and 3 mantissa bits, which no value needs a subnormal for.
The kernels read the bytes of two blocks of 16 values at once, and decode weights times 2**-`RESULT_SHIFT`, so that no
factor exceeds the range of bfloat16; they multiply the result by 2**`RESULT_SHIFT` and by the tensor scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pt2mx.formats import BUILT_IN, ElementFormat
from pt2mx.kernels.elements import decode
from pt2mx.kernels.float_scales import scale_values
from pt2mx.kernels.packing import pad_axis, unpack
from pt2mx.spec import MXSpec

ROWS = 16  # of a tile
_K_THREADS = 4  # threads of a warp that share a row
_BF16_BIAS, _BF16_MANTISSA_BITS = 127, 7
#: values of a block whose scale has a significand, and the bias and significant bits of such a scale's byte
_FLOAT_BLOCK, _FLOAT_BIAS, _FLOAT_BITS = 16, 16, 4
RESULT_SHIFT = 15

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
FRAGMENTS = {name: _fragment(e) for name, e in BUILT_IN.items() if name in _BITS or e.bits == 8}


def exponent_shift(element: ElementFormat) -> int:
    """Return log2 of the factor that turns the spread pairs of an element into its values."""
    return _BF16_BIAS - element.bias if FRAGMENTS[element.name].pairs else 0


def float_scale_offset(element: ElementFormat) -> int:
    """Return what a scale's byte, shifted to bit 4, lacks to be a factor in bfloat16 of the spread pairs."""
    return _BF16_BIAS - _FLOAT_BIAS - RESULT_SHIFT + exponent_shift(element) << _BF16_MANTISSA_BITS


_ROWS_AT_A_TIME = 256 * ROWS  # temporaries hold codes as integers of 8 bytes


def to_mma_layout(codes: Tensor, scale: Tensor, spec: MXSpec) -> tuple[Tensor, Tensor] | None:
    """Reorder the packed codes and the scales of a weight into the MMA layout.

    Args:
        codes, scale: (N, bytes), (N, ceil(K / block_size)), of a K that 8 divides.
        spec: their format, in blocks of one row.

    Returns:
        (n_tiles, k_steps, 2, words / 4, 32, 16) and (n_tiles, k_steps, 2, scales, 32) uint8: the vectors of 16 bytes of
        each thread, for rows g and g + 8, and its scales; the last tile and step are filled with zeros. Scales with a
        significand are (n_tiles, k_steps, 2, scales, 32, 2), without the tensor scale. None if products could be
        inexact: for another format, a NaN, an infinity, a block size that 32 does not divide (16, if scales have a
        significand), a scale so large that bfloat16 cannot represent it times two to the `exponent_shift`, or one
        without a byte.
    """
    element, is_power = spec.element, spec.has_power_of_two_scale
    if element.name not in FRAGMENTS or codes.dim() != 2 or not codes.numel():
        return None
    is_exact = is_power or element.mantissa_bits + 1 + _FLOAT_BITS <= _BF16_MANTISSA_BITS + 1
    if not is_exact or spec.block_size % (32 if is_power else _FLOAT_BLOCK):
        return None
    parts = []
    for rows in zip(codes.split(_ROWS_AT_A_TIME), scale.split(_ROWS_AT_A_TIME), strict=True):
        part = _rows_to_mma_layout(*rows, spec)
        if part is None:
            return None
        parts.append(part)
    words, scales = zip(*parts, strict=True)
    return torch.cat(words), torch.cat(scales)


def _rows_to_mma_layout(packed: Tensor, scale: Tensor, spec: MXSpec) -> tuple[Tensor, Tensor] | None:
    element, fragment = spec.element, FRAGMENTS[spec.element.name]
    codes = unpack(packed, 1, element.bits)  # (N, K') int32
    magnitude = codes & (1 << (element.bits - 1)) - 1
    if (element.has_nan or element.has_inf) and bool((magnitude > element.max_code).any()):
        return None
    if spec.has_power_of_two_scale:
        scales = _exponents(codes if element.is_int else magnitude, scale, spec)
        per_word = 1
    else:
        scales = _bytes_of_scales(scale, spec, codes.shape[1])
        per_word = 2
    if scales is None:
        return None
    if per_word == 2:  # the layout has no scale of zero: codes become zero instead, of any scale
        is_zero = (scales < 0).repeat_interleave(_FLOAT_BLOCK, 1)[:, : codes.shape[1]]
        codes, scales = torch.where(is_zero, codes - magnitude, codes), scales.clamp(min=0)
    codes = pad_axis(pad_axis(codes, 0, ROWS), 1, fragment.k_step)
    scales = pad_axis(pad_axis(scales, 0, ROWS), 1, _K_THREADS * fragment.scales * per_word)
    words = _spread(codes, fragment, element) if fragment.pairs else codes.to(torch.uint8).view(torch.int32)
    words = words.view(-1, 2, 8, codes.shape[1] // fragment.k_step, _K_THREADS, fragment.words // 4, 4)
    words = words.permute(0, 3, 1, 5, 2, 4, 6)  # (n_tiles, k_steps, 2, vectors, 8, 4, 4)
    scales = scales.view(-1, 2, 8, codes.shape[1] // fragment.k_step, _K_THREADS, fragment.scales, per_word)
    scales = scales.permute(0, 3, 1, 5, 2, 4, 6).to(torch.uint8).flatten(4, 5).contiguous()
    return words.contiguous().view(torch.uint8).flatten(4, 5), scales.squeeze(5) if per_word == 1 else scales


def _exponents(magnitude: Tensor, scale: Tensor, spec: MXSpec) -> Tensor | None:
    """Return E8M0 scales of blocks of 32, (N, ceil(K / 32)) int32."""
    scale = scale.repeat_interleave(spec.block_size // 32, 1)[:, : -(-magnitude.shape[1] // 32)].to(torch.int32)
    is_lost = scale > 254 - exponent_shift(spec.element)
    if not FRAGMENTS[spec.element.name].pairs:
        is_lost |= (scale == 0) & pad_axis(magnitude, 1, 32).unflatten(1, (-1, 32)).any(2)
    return None if bool(is_lost.any()) else scale


def _bytes_of_scales(scale: Tensor, spec: MXSpec, k: int) -> Tensor | None:
    """Return the bytes of scales of blocks of 16, (N, ceil(k / 16)) int32; for zero a negative number."""
    scale = scale.repeat_interleave(spec.block_size // _FLOAT_BLOCK, 1)[:, : -(-k // _FLOAT_BLOCK)]
    bits = scale_values(scale, spec).view(torch.int32)
    mantissa = 23 - (_FLOAT_BITS - 1)  # bits of fp32 that a byte lacks
    codes = (bits >> mantissa) - (_BF16_BIAS - _FLOAT_BIAS << _FLOAT_BITS - 1)
    has_byte = (codes >= 0) & (codes <= 0xFF) & ((bits & (1 << mantissa) - 1) == 0)
    return codes if bool((has_byte | (bits == 0)).all()) else None


def from_mma_layout(
    codes: Tensor, scale: Tensor, element: ElementFormat, n: int, k: int, tensor_scale: Tensor | None = None
) -> Tensor:
    """Return the weight that `to_mma_layout` reordered, times the tensor scale, (n, k) bfloat16. It defines the layout
    for the kernels."""
    fragment, (n_tiles, k_steps) = FRAGMENTS[element.name], codes.shape[:2]
    words = codes.view(torch.int32).view(n_tiles, k_steps, 2, fragment.words // 4, 8, _K_THREADS, 4)
    words = words.permute(0, 2, 4, 1, 5, 3, 6).reshape(n_tiles * ROWS, -1)  # (N, K * bits / 32)
    has_significand = scale.dim() == 6
    scale = scale.reshape(n_tiles, k_steps, 2, fragment.scales, 8, _K_THREADS, -1).permute(0, 2, 4, 1, 5, 3, 6)
    scale = scale.reshape(n_tiles * ROWS, -1).to(torch.int32)  # (N, blocks)
    if fragment.pairs:
        values = gather_bits(words, fragment).view(torch.bfloat16).to(torch.float32)
    else:
        values = decode(words.view(torch.uint8).to(torch.int32), element)
    if has_significand:
        values = values * 2.0 ** exponent_shift(element)
        bias = _BF16_BIAS - _FLOAT_BIAS << _FLOAT_BITS - 1
        factors = (scale + bias << 23 - (_FLOAT_BITS - 1)).view(torch.float32)
        if tensor_scale is not None:
            factors = factors * tensor_scale
    else:
        exponent = scale + exponent_shift(element)
        factors = torch.where(exponent == 0, 0.0, (exponent << 23).view(torch.float32))
    blocks = values.unflatten(1, (-1, _FLOAT_BLOCK if has_significand else 32))
    return (blocks * factors[..., None]).flatten(1)[:n, :k].to(torch.bfloat16)


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
