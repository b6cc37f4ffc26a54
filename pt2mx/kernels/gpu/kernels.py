"""The Triton kernels: each loads a tile (`tiles`), computes (`blocks`) and stores.

Arguments: `n` and `inner` of the tensor, seen as (outer, n, inner); `size`, the bytes of data along the axis; `lines`,
the number of lines of the tensor; `seed`, () int64, of stochastic rounding; `tensor_scale`, () fp32, of scale formats
with one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pt2mx.kernels.gpu.bf16x2 import amax_of_pairs, code_words, largest_magnitude, pair_of
from pt2mx.kernels.gpu.blocks import (
    NAN_SCALE,
    counted,
    decode,
    encode,
    factor_of,
    over_scale,
    random_at,
    rotated,
    rounded,
    scale_of_amax,
    stored_scale,
)
from pt2mx.kernels.gpu.float_scales import load_tensor_scale
from pt2mx.kernels.gpu.scales import fake_quantized, scale_of
from pt2mx.kernels.gpu.tiles import part_offsets, tile_lines, tile_offsets, word_offsets


@triton.jit
def fake_quantize_kernel(x, y, tensor_scale, seed, n, inner, lines, C: tl.constexpr, ROTATION: tl.constexpr = 0):
    """`ROTATION`: size of the blocks of x that are rotated first."""
    offsets, mask = tile_offsets(n, inner, lines, C.block, C.tile, 1, C)
    blocks = load_values(x, offsets, mask)
    if ROTATION:
        blocks = rotated(blocks, ROTATION).to(y.dtype.element_ty).to(tl.float32)
    quantized = fake_quantized(blocks, load_tensor_scale(tensor_scale, C), seed, offsets, C)
    tl.store(y + offsets, quantized.to(y.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(x, codes, scales, tensor_scale, seed, n, size, inner, lines, C: tl.constexpr):
    offsets, mask = part_offsets(n, inner, lines, 0, C)
    parts = (load_values(x, offsets, mask),)
    for i in tl.static_range(tl.constexpr(1), tl.constexpr(C.parts)):
        offsets, mask = part_offsets(n, inner, lines, i, C)
        parts = parts + (load_values(x, offsets, mask),)
    scale, finite = scale_of(parts, load_tensor_scale(tensor_scale, C), C)
    first, line = tile_lines(C)
    stored = stored_scale(scale, finite, C).to(scales.dtype.element_ty)
    tl.store(scales + first + line, stored, mask=first + line < lines)
    for i in tl.static_range(tl.constexpr(C.parts)):
        offsets, mask = part_offsets(n, inner, lines, i, C)
        v, p = rounded(parts[i], scale, finite, seed, offsets, C)
        if i == 0:
            words = encode(p, v, C)
        else:
            words |= encode(p, v, C) << (C.bits * i)
    if not C.strided:
        words = pack(words, C)
    store_words(codes, words, finite, size, inner, lines, C)


@triton.jit
def quantize_bf16x2_kernel(x, codes, scales, n, size, inner, lines, C: tl.constexpr):
    """`quantize_kernel` of bfloat16 values, two an instruction."""
    first, line = tile_lines(C)
    if C.strided:
        low, high = load_pair(x, 0, n, inner, lines, C), load_pair(x, 2, n, inner, lines, C)
    else:
        PAIRS: tl.constexpr = C.tile // 2
        offsets = tl.expand_dims(first + line, 1) * PAIRS + tl.arange(0, PAIRS)[None, :]
        mask = tl.expand_dims(first + line < lines, 1)
        pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + offsets, mask=mask, other=0)
        low, high = tl.split(tl.reshape(pairs, [C.lines, PAIRS // 2, 2]))
    scale, finite = scale_of_amax(amax_of_pairs(largest_magnitude(low, high), 1), C)
    tl.store(scales + first + line, tl.where(finite, scale, NAN_SCALE).to(tl.uint8), mask=first + line < lines)
    store_words(codes, code_words(low, high, scale, C), finite, size, inner, lines, C)


@triton.jit
def dequantize_kernel(codes, scales, y, tensor_scale, n, size, inner, lines, C: tl.constexpr):
    offsets, mask = word_offsets(size, inner, lines, C)
    words = tl.load(codes + offsets, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(tl.constexpr(1), tl.constexpr(C.word_bytes)):
        offsets += inner
        words |= tl.load(codes + offsets, mask=mask, other=0).to(tl.int32) << (8 * i)
    first, line = tile_lines(C)
    scale = tl.load(scales + first + line, mask=first + line < lines, other=0).to(tl.int32)
    if C.has_significand:  # the value of a NaN is one
        scale, finite = (scale, load_tensor_scale(tensor_scale, C)), tl.full([], True, tl.int1)
    else:
        finite = scale != NAN_SCALE
    factors = factor_of(scale, finite, C)
    if not C.strided:
        words = unpack(words, C)
    for i in tl.static_range(tl.constexpr(C.parts)):
        offsets, mask = part_offsets(n, inner, lines, i, C)
        values = counted(decode(words >> (C.bits * i), C), C) * factors
        tl.store(y + offsets, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def clip_gradient_kernel(grad, x, y, tensor_scale, n, inner, lines, C: tl.constexpr):
    offsets, mask = tile_offsets(n, inner, lines, C.block, C.tile, 1, C)
    blocks = load_values(x, offsets, mask)
    scale, finite = scale_of((blocks,), load_tensor_scale(tensor_scale, C), C)
    v = over_scale(blocks, scale, finite, C)
    passed = tl.load(grad + offsets, mask=mask, other=0.0)
    tl.store(y + offsets, tl.where((v > C.max_normal) | (v < C.lowest), 0.0, passed), mask=mask)


@triton.jit
def rotate_kernel(x, out, count, VALUES: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    """x: (count,) -> out: (count,), in blocks of SIZE."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    at = first * VALUES + tl.arange(0, VALUES)
    if PDL:
        gdc_wait()
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    tl.store(out + at, rotated(values, SIZE).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def random_bits_kernel(seed, out, count, SIZE: tl.constexpr):
    positions = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(out + positions, random_at(seed, positions), mask=positions < count)


@triton.jit
def load_values(x, offsets, mask):
    """Load values of x as fp32, zeros outside the mask."""
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_pair(x, FROM: tl.constexpr, n, inner, lines, C: tl.constexpr):
    """Load pairs: the values FROM and FROM + 1 of every four of a block."""
    offsets, mask = part_offsets(n, inner, lines, FROM, C)
    low = tl.load(x + offsets, mask=mask, other=0.0)
    offsets, mask = part_offsets(n, inner, lines, FROM + 1, C)
    return pair_of(low, tl.load(x + offsets, mask=mask, other=0.0))


@triton.jit
def pack(codes, C: tl.constexpr):
    """codes: (lines, tile) int32 -> (lines, tile / word_codes) int32 words."""
    if C.word_codes == 1:
        words = codes
    else:
        shift = C.bits * tl.arange(0, C.word_codes)[None, None, :]
        words = tl.sum(tl.reshape(codes, [C.lines, C.tile_words, C.word_codes]) << shift, 2)
    return words


@triton.jit
def unpack(words, C: tl.constexpr):
    """Invert `pack`; the bits above a code are undefined."""
    if C.word_codes == 1:
        codes = words
    else:
        shift = C.bits * tl.arange(0, C.word_codes)[None, None, :]
        codes = tl.reshape(words[:, :, None] >> shift, [C.lines, C.tile])
    return codes


@triton.jit
def store_words(codes, words, finite, size, inner, lines, C: tl.constexpr):
    """Store words of packed codes, zeros for the blocks that are not finite."""
    words = tl.where(tl.expand_dims(finite, 1), words, 0)
    if C.streams:
        store_stream(codes, words, lines, C)
    else:
        offsets, mask = word_offsets(size, inner, lines, C)
        for i in tl.static_range(tl.constexpr(C.word_bytes)):
            tl.store(codes + offsets, (words >> (8 * i)).to(tl.uint8), mask=mask)
            offsets += inner


@triton.jit
def store_stream(codes, words, lines, C: tl.constexpr):
    """Store words of four codes, 2 to 4 bytes each, as a stream of 4-byte integers."""
    first, _line = tile_lines(C)
    existing = tl.minimum(lines - first, C.lines)
    stream = codes.to(tl.pointer_type(tl.int32))
    # words to a group, which is whole integers
    WORDS: tl.constexpr = 4 if C.word_bytes == 3 else 4 // C.word_bytes
    GROUPS: tl.constexpr = C.tile_words // WORDS
    group = tl.arange(0, C.lines * GROUPS)
    mask = group < existing * GROUPS
    stream += (first * GROUPS + group) * (WORDS * C.word_bytes // 4)
    if C.word_bytes == 4:
        tl.store(stream, tl.reshape(words, [C.lines * GROUPS]), mask=mask)
    elif C.word_bytes == 2:
        w0, w1 = tl.split(tl.reshape(words, [C.lines * GROUPS, 2]))
        tl.store(stream, w0 | w1 << 16, mask=mask)
    else:
        even, odd = tl.split(tl.reshape(words, [C.lines * GROUPS, 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        tl.store(stream, w0 | w1 << 24, mask=mask)
        tl.store(stream + 1, w1 >> 8 | w2 << 16, mask=mask)
        tl.store(stream + 2, w2 >> 16 | w3 << 8, mask=mask)
