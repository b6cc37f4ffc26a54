"""The GPU kernels' view of a tensor: tiles of blocks, their offsets in memory, compile-time values.

A tensor is seen as (outer, n, inner) with blocks along n. A line is one block of one column: line
`(o * blocks + b) * inner + c` holds the values `(o, b * block + i, c)`, and has one scale, at that index. A program
works on a tile of consecutive lines. If inner is 1, the tile is (lines, block), and threads share a block. Otherwise it
is (lines / vector, block, vector): each thread has its own blocks, and neighbouring threads have neighbouring columns.
In the kernels' docstrings, "(lines)" is the shape of a tile without dimension 1, the one within blocks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import triton
import triton.language as tl

from pt2mx.kernels.gpu.float_scales import ScaleConstants


@dataclass(frozen=True)
class Constants:
    """The compile-time values of a spec: fields of `ElementFormat`, `ScaleMode` and `Rounding`, and of its tile.

    `word_codes` codes are packed into a word of `word_bytes` bytes. A tile has `lines` lines, each of `block` values
    padded to `tile`, a power of two. `strided`: inner is not 1. `whole`: no block is ragged. `aligned`: the lines of a
    tile belong to one row of blocks. `vector`: lines per thread. `wide`: offsets need 64 bits.
    """

    bits: int
    mantissa_bits: int
    bias: int
    emin: int
    emax: int
    max_code: int
    max_normal: float
    lowest: float
    has_inf: bool
    has_nan: bool
    is_int: bool
    full_range: bool
    threshold: int
    exponent_offsets: tuple[int, ...]
    searches: bool
    error_bits: int
    rounding: str
    nearest: str
    directed: bool
    random: bool
    word_codes: int
    word_bytes: int
    block: int
    tile: int
    lines: int
    strided: bool
    whole: bool
    aligned: bool
    vector: int
    wide: bool
    scale: ScaleConstants | None = None  # of a scale format with a significand

    @property
    def has_significand(self) -> bool:
        return self.scale is not None

    @property
    def streams(self) -> bool:
        """Return whether the codes of a tile are one stream of packed bytes that starts and ends at a multiple of four
        bytes."""
        return not self.strided and self.word_codes > 1 and self.whole and self.tile == self.block >= 16

    @property
    def max_pair(self) -> int:
        """Return the largest magnitude as a pair of bfloat16 (`bf16x2`); the next two properties are pairs too."""
        return _pair_of_bfloat16(self.max_normal)

    @property
    def min_normal_pair(self) -> int:
        return _pair_of_bfloat16(2.0**self.emin)

    @property
    def rounding_pair(self) -> int:
        """Return the factor that moves the quanta of a binade to the last bits of a bfloat16."""
        return _pair_of_bfloat16(2.0 ** (7 - self.mantissa_bits))

    @property
    def first_code_pair(self) -> int:
        """Return, in each half, the number that subtracts the biased exponent of the first binade from a code."""
        return (-(127 + self.emin << self.mantissa_bits) % (1 << self.bits - 1)) * 0x00010001

    @property
    def byte_mask(self) -> int:
        """Return the mask of four codes, one per byte, as an int32."""
        mask = 0x01010101 * ((1 << self.bits) - 1)
        return mask - (mask >> 31 << 32)

    @property
    def parts(self) -> int:
        """Return the number of tiles into which a packing kernel splits its values, so that the codes of a word have
        the same index."""
        return self.word_codes if self.strided else 1

    @property
    def candidates(self) -> int:
        return len(self.exponent_offsets) if self.scale is None else self.scale.candidates

    @property
    def special(self) -> bool:
        """Return whether some codes are Inf or NaN."""
        return self.has_inf or self.has_nan

    @property
    def block_words(self) -> int:
        return -(-self.block // self.word_codes)

    @property
    def tile_words(self) -> int:
        return self.tile // self.word_codes


def _pair_of_bfloat16(value: float) -> int:
    """Return the bits of two bfloat16, each equal to `value`, which bfloat16 represents."""
    return (struct.unpack("<I", struct.pack("<f", value))[0] >> 16) * 0x00010001


@triton.jit
def tile_lines(C: tl.constexpr):
    """Return the number of the tile's first line, () int32 or int64, and the numbers of its lines relative to that,
    (lines) int32."""
    first = tl.program_id(0)
    if C.wide:
        first = first.to(tl.int64)
    if C.strided:
        line = tl.arange(0, C.lines // C.vector)[:, None] * C.vector + tl.arange(0, C.vector)[None, :]
    else:
        line = tl.arange(0, C.lines)
    return first * C.lines, line


@triton.jit
def tile_offsets(
    n,
    inner,
    lines,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
    C: tl.constexpr,
    FROM: tl.constexpr = 0,
    STEP: tl.constexpr = 1,
):
    """Offsets of the items of a tile in a tensor (outer, n * STRIDE, inner); a block has BLOCK * STRIDE items along
    n, and which of them exist; a tile. An item is the first of STRIDE neighbours along n; the tile has every STEP-th
    item of each block, from FROM on."""
    first, line = tile_lines(C)
    mask = tl.expand_dims(first + line < lines, 1)
    index = tl.arange(0, TILE) * STEP + FROM
    if C.wide:
        index = index.to(tl.int64)
    if C.strided:
        index = index[None, :, None]
        position = index * inner
    else:
        index = index[None, :]
        position = index
    if C.whole and not C.strided:
        start = (first + line) * (BLOCK * STRIDE)
    else:
        blocks = tl.cdiv(n, BLOCK)
        if C.aligned:
            row = first // inner
            column = tl.multiple_of(first % inner, tl.constexpr(C.lines)) + line
        else:
            row = (first + line) // inner
            column = (first + line) % inner
        block = row % blocks
        start = ((row // blocks) * n + block * BLOCK) * STRIDE * inner + column
        if not C.whole:
            length = tl.minimum(n - block * BLOCK, BLOCK) + tl.zeros_like(line)
            mask = mask & (index < tl.expand_dims(length, 1))
    if C.whole and TILE * STEP != BLOCK:
        mask = mask & (index < BLOCK)
    return tl.expand_dims(start, 1) + position * STRIDE, mask


@triton.jit
def part_offsets(n, inner, lines, PART: tl.constexpr, C: tl.constexpr):
    """Return the offsets of every `parts`-th value of each block, from value PART on, and which of them exist."""
    return tile_offsets(n, inner, lines, C.block, C.tile // C.parts, 1, C, PART, C.parts)


@triton.jit
def word_offsets(size, inner, lines, C: tl.constexpr):
    """Return the offsets of the first byte of each word of a tile, and which of them exist; (lines, words)."""
    return tile_offsets(size // C.word_bytes, inner, lines, C.block_words, C.tile_words, C.word_bytes, C)
