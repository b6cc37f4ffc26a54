"""The order in which `gpu_linear` keeps the codes of a weight: that of the tensor cores' fragments, bits included.

A warp multiplies tiles of 16 rows. Of a tile, thread 4 * g + t of PTX's `mma.m16n8k16` holds rows g and g + 8; which
values along K is free as long as it is the same for x, so that each thread takes `VALUES` consecutive ones. A tile's
codes lie so that each load of a warp is 512 bytes in a row.

Codes of 8 bits that the instructions of a GPU convert lie as they are. The bits of other elements are spread over the
words so that most pairs of values are one mask away from a pair of bfloat16: sign and magnitude at their places, which
gives the value times a power of two, subnormals included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.kernels.axis import pad_axis
from pt2mx.kernels.elements import decode
from pt2mx.kernels.gpu.bytes import FROM_BYTES
from pt2mx.kernels.packing import unpack

ROWS, THREADS = 16, 32
_PLACES_OF_K = 4  # threads that share a row


class Piece(NamedTuple):
    """The bits `mask` of both halves of a pair: those of a word, shifted left."""

    word: int
    left: int
    mask: int


class Fragment(NamedTuple):
    """What one thread holds of a row at a time: `values` in `words` of 32 bits, with `scales` of them.

    `pairs`: for elements whose bits are spread the pieces of each pair of a group of values; the low half is the first.
    """

    values: int
    words: int
    scales: int
    pairs: tuple[tuple[Piece, ...], ...] = ()

    @property
    def step(self) -> int:
        """Values along K that the threads of a warp hold at a time."""
        return _PLACES_OF_K * self.values


def _direct(words: int, shifts: tuple[int, ...], mask: int) -> tuple[tuple[Piece, ...], ...]:
    return tuple((Piece(word, shift, mask),) for word in range(words) for shift in shifts)


def _of_bytes(element: ElementFormat) -> Fragment:
    """Of an element of 8 bits: where it is spread, one word to four values."""
    if element.name in FROM_BYTES:
        return Fragment(values=32, words=8, scales=1)
    m = element.mantissa_bits
    low = Piece(0, 7 - m, (1 << 14 - 2 * m) - (1 << 7 - m))  # of the magnitude the lowest 7 - m bits, then the others
    high = Piece(0, -m, (1 << 14 - m) - (1 << 14 - 2 * m))
    second = (low, *([high] if m else []), Piece(0, 1, 0x8000))
    return Fragment(32, 8, 1, (*_direct(1, (0,), 0x8000 | 0x7F << 7 - m), second))


#: element -> fragment. What the pairs in place leave over of the words holds the others, in pieces.
FRAGMENTS = {
    "fp4_e2m1": Fragment(
        values=32,
        words=4,
        scales=1,
        pairs=_direct(2, (0, 3, 6), 0x81C0)
        + (
            (Piece(0, -3, 0x0180), Piece(0, 1, 0x8000), Piece(1, -4, 0x0040)),
            (Piece(1, -6, 0x0180), Piece(0, 2, 0x8000), Piece(1, -5, 0x0040)),
        ),
    ),
    "fp6_e3m2": Fragment(
        values=64,
        words=12,
        scales=2,
        pairs=_direct(3, (0, 5), 0x83E0)
        + (
            (Piece(0, -5, 0x03C0), Piece(2, 1, 0x8000), Piece(2, -8, 0x0020)),
            (Piece(1, -5, 0x03C0), Piece(2, 3, 0x8000), Piece(2, -6, 0x0020)),
        ),
    ),
    "fp6_e2m3": Fragment(
        values=64,
        words=12,
        scales=2,
        pairs=_direct(3, (0,), 0x81F0)
        + tuple((Piece(word, -5, 0x01F0), Piece(word, 1, 0x8000)) for word in range(3))
        + (
            (Piece(0, 5, 0x01E0), Piece(2, 12, 0x8000), Piece(2, 2, 0x0010)),
            (Piece(1, 5, 0x01E0), Piece(2, 14, 0x8000), Piece(2, 4, 0x0010)),
        ),
    ),
    **{name: _of_bytes(element) for name, element in ELEMENTS.items() if element.bits == 8},
}
_BF16_BIAS, _BF16_MANTISSA_BITS = 127, 7


def exponent_shift(element: ElementFormat) -> int:
    """log2 of what the pairs of an element have to be multiplied with."""
    return _BF16_BIAS - element.bias if FRAGMENTS[element.name].pairs else 0


def to_fragments(data: Tensor, scale: Tensor, element: ElementFormat, block_size: int) -> tuple[Tensor, Tensor] | None:
    """The codes and scales of a weight in the order of fragments.

    Args:
        data, scale: (N, bytes), (N, ceil(K / block_size)) uint8, of a K that 8 divides.

    Returns:
        (tiles, steps, 2, words / 4, 32, 16) and (tiles, steps, 2, scales, 32) uint8: the vectors of 16 bytes of each
        thread, for rows g and g + 8, and its scales; the rest of the last tile and step is zeros. None where the
        product could not be exact: for another format, a NaN, an infinity, a block size that 32 does not divide, or
        scales so large that a bfloat16 cannot hold their product with the power of two above.
    """
    fragment = FRAGMENTS.get(element.name)
    if fragment is None or block_size % 32 or data.dim() != 2 or not data.numel():
        return None
    parts = []
    for rows in zip(data.split(_ROWS_AT_A_TIME), scale.split(_ROWS_AT_A_TIME), strict=True):
        parts.append(_rows_to_fragments(*rows, element, block_size))
        if parts[-1] is None:
            return None
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


_ROWS_AT_A_TIME = 256 * ROWS  # the codes are integers of 8 bytes on the way


def _rows_to_fragments(data: Tensor, scale: Tensor, element: ElementFormat, block_size: int) -> tuple | None:
    fragment = FRAGMENTS[element.name]
    codes = unpack(data, 1, element.bits)  # (N, K') int32
    magnitude = codes & (1 << (element.bits - 1)) - 1
    scale = scale.repeat_interleave(block_size // 32, 1)[:, : -(-codes.shape[1] // 32)].to(torch.int32)
    blocks = pad_axis(codes if element.is_int else magnitude, 1, 32).unflatten(1, (-1, 32))
    lost = (scale == 0) & blocks.any(2) if not fragment.pairs else scale.new_zeros((), dtype=torch.bool)
    special = magnitude > element.max_code if element.has_nan or element.has_inf else lost
    if bool((scale > 254 - exponent_shift(element)).any() | lost.any() | special.any()):
        return None
    codes = pad_axis(pad_axis(codes, 0, ROWS), 1, fragment.step)
    scale = pad_axis(pad_axis(scale, 0, ROWS), 1, _PLACES_OF_K * fragment.scales)
    words = _spread(codes, fragment, element) if fragment.pairs else _bytes(codes)
    words = words.view(-1, 2, 8, codes.shape[1] // fragment.step, _PLACES_OF_K, fragment.words // 4, 4)
    words = words.permute(0, 3, 1, 5, 2, 4, 6)  # (tiles, steps, 2, vectors, 8, 4, 4)
    scale = scale.view(-1, 2, 8, codes.shape[1] // fragment.step, _PLACES_OF_K, fragment.scales)
    scale = scale.permute(0, 3, 1, 5, 2, 4).to(torch.uint8)
    return words.contiguous().view(torch.uint8).flatten(4, 5), scale.flatten(4, 5).contiguous()


def from_fragments(data: Tensor, scale: Tensor, element: ElementFormat, n: int, k: int) -> Tensor:
    """The weight that `to_fragments` took, (n, k) bfloat16; the definition of what the kernels read."""
    fragment, (tiles, steps) = FRAGMENTS[element.name], data.shape[:2]
    words = data.view(torch.int32).view(tiles, steps, 2, fragment.words // 4, 8, _PLACES_OF_K, 4)
    words = words.permute(0, 2, 4, 1, 5, 3, 6).reshape(tiles * ROWS, -1)  # (N, K * bits / 32)
    scale = scale.view(tiles, steps, 2, fragment.scales, 8, _PLACES_OF_K).permute(0, 2, 4, 1, 5, 3)
    scale = scale.reshape(tiles * ROWS, -1).to(torch.int32) + exponent_shift(element)  # (N, K / 32)
    if fragment.pairs:
        values = _together(words, fragment).view(torch.bfloat16).to(torch.float32)
    else:
        values = decode(words.view(torch.uint8).to(torch.int32), element)
    factors = torch.where(scale == 0, 0.0, (scale << 23).view(torch.float32))
    return (values.unflatten(1, (-1, 32)) * factors[..., None]).flatten(1)[:n, :k].to(torch.bfloat16)


def _words_of_group(fragment: Fragment) -> int:
    return 1 + max(piece.word for pieces in fragment.pairs for piece in pieces)


def _together(words: Tensor, fragment: Fragment) -> Tensor:
    """words: (N, K * bits / 32) int32 -> the bits of bfloat16, (N, K) int16."""
    words = words.to(torch.int64).unflatten(1, (-1, _words_of_group(fragment)))
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


def _bytes(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.int32)


def _spread(codes: Tensor, fragment: Fragment, element: ElementFormat) -> Tensor:
    """codes: (N, K) int32 -> (N, K * bits / 32) int32."""
    last = _BF16_MANTISSA_BITS - element.mantissa_bits
    magnitude, sign = codes & (1 << (element.bits - 1)) - 1, codes >> (element.bits - 1)
    pairs = (magnitude << last | sign << 15).to(torch.int64).unflatten(1, (-1, len(fragment.pairs), 2))
    words = pairs.new_zeros((*pairs.shape[:2], _words_of_group(fragment), 2))
    for i, pieces in enumerate(fragment.pairs):
        for piece in pieces:
            bits = pairs[:, :, i] & piece.mask
            bits = bits >> piece.left if piece.left > 0 else bits << -piece.left
            words[:, :, piece.word] |= bits
    words = words[..., 0] | words[..., 1] << 16
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32).flatten(1)


def decode_ptx(element: ElementFormat) -> str:
    """PTX for a thread's fragment: from its words, then 4 equal registers with each scale as a pair of bfloat16 (times
    two to the `exponent_shift`), to a pair of bfloat16 for each two values."""
    fragment = FRAGMENTS[element.name]
    outputs = fragment.values // 2
    words = [f"${outputs + i}" for i in range(fragment.words)]
    pairs = _from_pieces(fragment, words) if fragment.pairs else FROM_BYTES[element.name](words)
    lines = [".reg .b32 h, a, u, r, none, minus;", ".reg .b16 lo, hi;", ".reg .f32 x, y;"]
    lines += ["mov.b32 none, 0x80008000;", "mov.b32 minus, 0xBF80BF80;"]
    for i, pair in enumerate(pairs):  # leaves it in r
        scale = f"${outputs + fragment.words + 4 * (i * fragment.scales // outputs)}"
        lines += [*pair, f"fma.rn.bf16x2 ${i}, r, {scale}, none;"]  # a product alone needs sm_90
    return "{\n" + "\n".join(lines) + "\n}"


def _from_pieces(fragment: Fragment, words: list[str]) -> list[list[str]]:
    size = _words_of_group(fragment)
    pairs = []
    for first in range(0, len(words), size):
        for pieces in fragment.pairs:
            lines = []
            for i, (word, left, mask) in enumerate(pieces):
                source = words[first + word]
                if left:
                    shift = f"shl.b32 u, {source}, {left};" if left > 0 else f"shr.u32 u, {source}, {-left};"
                    lines, source = [*lines, shift], "u"
                twice = f"0x{mask << 16 | mask:08X}"
                lines.append(f"lop3.b32 r, {source}, {twice}, r, 0xEA;" if i else f"and.b32 r, {source}, {twice};")
            pairs.append(lines)
    return pairs
