"""The device code of `rotate_and_store`, in Triton.

A program takes one head of one token: of the queries, which it rotates, of the keys, which it rotates and stores, or of
the values, which it stores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["length", "count"])
def rotate_and_store_kernel(
    news, strides, outs, slots, factors, length, heads, key_heads, count,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """news: query, key, value (B, heads, length, width) by their strides -> outs: (B, heads, length, WIDTH), keys (B,
    key_heads, count, WIDTH) and values; factors: cos and sin (B, length, WIDTH)."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0), tl.program_id(1)
    sequence, position = token // length, token % length
    slot = tl.load(slots + position)
    inside = (slot >= 0) & (slot < count)  # a slot past the end of the cache is not written
    at = tl.arange(0, WIDTH)
    if head < heads:
        rotated = _rotated(news[0], strides[0], factors, sequence, head, position, length, WIDTH)
        row = (sequence * heads + head).to(tl.int64) * length + position
        tl.store(outs[0] + row * WIDTH + at, rotated.to(outs[0].dtype.element_ty))
    elif head < heads + key_heads:
        rotated = _rotated(news[1], strides[1], factors, sequence, head - heads, position, length, WIDTH)
        row = (sequence * key_heads + head - heads).to(tl.int64) * count + slot
        tl.store(outs[1] + row * WIDTH + at, rotated.to(outs[1].dtype.element_ty), mask=(at >= 0) & inside)
    else:
        of_values, at_value = head - heads - key_heads, tl.arange(0, VALUE_WIDTH)
        first = _row(news[2], strides[2], sequence, of_values, position)
        row = (sequence * key_heads + of_values).to(tl.int64) * count + slot
        tl.store(outs[2] + row * VALUE_WIDTH + at_value, tl.load(first + at_value), mask=(at_value >= 0) & inside)


@triton.jit
def _row(x, strides, sequence, head, position):
    return x + sequence.to(tl.int64) * strides[0] + head * strides[1] + position * strides[2]


@triton.jit
def _rotated(x, strides, factors, sequence, head, position, length, WIDTH: tl.constexpr):
    """Return x * cos + y * sin in float32, where y is x with its halves swapped and the new first half negated."""
    at = tl.arange(0, WIDTH)
    row = _row(x, strides, sequence, head, position)
    of_token = (sequence * length + position) * WIDTH + at
    other = tl.load(row + (at + WIDTH // 2) % WIDTH).to(tl.float32)
    other = tl.where(at < WIDTH // 2, -other, other)
    cos, sin = tl.load(factors[0] + of_token).to(tl.float32), tl.load(factors[1] + of_token).to(tl.float32)
    return tl.load(row + at).to(tl.float32) * cos + other * sin
