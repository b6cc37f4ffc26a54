"""The device code of `rotate_and_store` and `rotate_quantize_and_store`, in Triton.

A program takes one head of one token: of the queries, which it rotates, of the keys, which it rotates and stores, or of
the values, which it stores. A row that is stored as codes is one tile of blocks (`tiles`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pt2mx.kernels.gpu.blocks import encode, rounded, stored_scale
from pt2mx.kernels.gpu.float_scales import load_tensor_scale
from pt2mx.kernels.gpu.kernels import pack
from pt2mx.kernels.gpu.scales import scale_of


@triton.jit(do_not_specialize=["length", "count"])
def rotate_and_store_kernel(
    news, strides, outs, slots, factors, length, heads, key_heads, count,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """news: query, key, value (B, heads, length, width) by their strides -> outs: (B, heads, length, WIDTH), keys (B,
    key_heads, count, WIDTH) and values; factors: cos and sin (B, length, WIDTH).

    KEY, VALUE: None, or the constants of rows that are stored as codes. Then outs have codes (B, key_heads, count,
    bytes) and scales of the keys, and of the values."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0), tl.program_id(1)
    sequence, position = token // length, token % length
    slot = tl.load(slots + position)
    inside = (slot >= 0) & (slot < count)  # a slot past the end of the cache is not written
    if head < heads:
        row = (sequence * heads + head).to(tl.int64) * length + position
        rotated = _rotated(news[0], strides[0], factors, sequence, head, position, length, WIDTH)
        tl.store(outs[0] + row * WIDTH + tl.arange(0, WIDTH), rotated)
    elif head < heads + key_heads:
        rotated = _rotated(news[1], strides[1], factors, sequence, head - heads, position, length, WIDTH)
        row = (sequence * key_heads + head - heads).to(tl.int64) * count + slot
        if KEY is None:
            _store_values(outs[1], rotated, row, inside, WIDTH)
        else:
            _store_codes(outs[1], outs[2], rotated, row, inside, KEY)
    else:
        of_values = head - heads - key_heads
        values = tl.load(_row(news[2], strides[2], sequence, of_values, position) + tl.arange(0, VALUE_WIDTH))
        row = (sequence * key_heads + of_values).to(tl.int64) * count + slot
        if VALUE is None:
            _store_values(outs[2], values, row, inside, VALUE_WIDTH)
        else:
            _store_codes(outs[3], outs[4], values, row, inside, VALUE)


@triton.jit
def _row(x, strides, sequence, head, position):
    return x + sequence.to(tl.int64) * strides[0] + head * strides[1] + position * strides[2]


@triton.jit
def _rotated(x, strides, factors, sequence, head, position, length, WIDTH: tl.constexpr):
    """Return x * cos + y * sin in float32, rounded to bfloat16, where y is x with its halves swapped and the new first
    half negated. A product of two bfloat16 is exact, so a fused multiply-add has the bits of two operations."""
    at = tl.arange(0, WIDTH)
    row = _row(x, strides, sequence, head, position)
    of_token = (sequence * length + position) * WIDTH + at
    other = tl.load(row + (at + WIDTH // 2) % WIDTH).to(tl.float32)
    other *= tl.where(at < WIDTH // 2, -1.0, 1.0)  # Triton's minus is 0 - x, which is no -0
    cos, sin = tl.load(factors[0] + of_token).to(tl.float32), tl.load(factors[1] + of_token).to(tl.float32)
    return (tl.load(row + at).to(tl.float32) * cos + other * sin).to(x.dtype.element_ty)


@triton.jit
def _store_values(out, values, row, inside, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + row * WIDTH + at, values, mask=(at >= 0) & inside)


@triton.jit
def _store_codes(codes, scales, values, row, inside, C: tl.constexpr):
    """values: (lines * block) of row `row` -> its codes and its scales, stored where `inside`."""
    blocks = tl.reshape(values.to(tl.float32), [C.lines, C.tile])
    scale, finite = scale_of((blocks,), load_tensor_scale(None, C), C)
    line = tl.arange(0, C.lines)
    stored = stored_scale(scale, finite, C).to(scales.dtype.element_ty)
    tl.store(scales + row * C.lines + line, stored, mask=(line >= 0) & inside)
    v, p = rounded(blocks, scale, finite, None, None, C)
    words = tl.where(finite[:, None], pack(encode(p, v, C), C), 0)
    word = line[:, None] * C.tile_words + tl.arange(0, C.tile_words)[None, :]
    first = codes + (row * (C.lines * C.tile_words) + word) * C.word_bytes
    for i in tl.static_range(tl.constexpr(C.word_bytes)):
        tl.store(first + i, (words >> (8 * i)).to(tl.uint8), mask=(word >= 0) & inside)
