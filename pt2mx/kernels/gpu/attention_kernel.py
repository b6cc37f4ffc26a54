"""The device code of attention over packed keys and values, in Triton."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from pt2mx.kernels.gpu.blocks import NAN_SCALE, decode, factor


class Elements(NamedTuple):
    """The compile-time values of an element: fields of `ElementFormat`. `special`: some codes are no numbers."""

    bits: int
    mantissa_bits: int
    bias: int
    emin: int
    max_normal: float
    is_int: bool
    special: bool


@triton.jit
def attend_kernel(
    query, key, key_scale, value, value_scale, mask, sums, limits, scale, rows, queries, heads, slots, blocks,
    mask_batch, mask_head, mask_query, mask_slot,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """query: (pairs, rows, WIDTH), key: (pairs, slots, bytes), its scales, those of the values, mask: booleans by the
    strides -> sums: (parts, pairs, ROWS, VALUE_WIDTH), limits: (2, parts, pairs, ROWS), of the slots of a part."""
    part, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts, pairs = tl.num_programs(0), tl.num_programs(1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < rows
    q = tl.load(query + (pair * rows + row[:, None]) * WIDTH + column[None, :], mask=inside[:, None], other=0.0)
    head = pair % heads * (rows // queries) + row // queries
    seen_by = mask + pair // heads * mask_batch + head * mask_head + row % queries * mask_query
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    whole = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for block in range(part * blocks, tl.minimum((part + 1) * blocks, tl.cdiv(slots, SLOTS))):
        slot = block * SLOTS + tl.arange(0, SLOTS)
        seen = inside[:, None] & (slot < slots)[None, :]
        if MASKED:
            seen &= tl.load(seen_by[:, None] + slot[None, :] * mask_slot, mask=seen, other=0) != 0
        if tl.max(seen.to(tl.int32)) > 0:  # most slots of a cache that has just begun are hidden from all
            at = pair * slots + slot
            k = values_at(key, key_scale, at, slot < slots, WIDTH, BLOCK, C).to(q.dtype)
            scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
            most = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(most == float("-inf"), 0.0, most)
            weights = tl.exp(scores - shift[:, None])
            before = tl.exp(largest - shift)
            v = values_at(value, value_scale, at, slot < slots, VALUE_WIDTH, VALUE_BLOCK, C).to(q.dtype)
            total = total * before[:, None] + tl.dot(weights.to(q.dtype), v)
            whole = whole * before + tl.sum(weights, 1)
            largest = most
    first = (part * pairs + pair) * ROWS
    tl.store(limits + first + row, largest)
    tl.store(limits + parts * pairs * ROWS + first + row, whole)
    wide = tl.arange(0, VALUE_WIDTH)
    tl.store(sums + (first + row[:, None]) * VALUE_WIDTH + wide[None, :], total)


@triton.jit
def values_at(codes, scales, at, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """codes: (n, bytes of WIDTH), scales: (n, WIDTH / BLOCK) -> (len(at), WIDTH) fp32, rows `at` of them."""
    BYTES: tl.constexpr = WIDTH * C.bits // 8
    column = tl.arange(0, WIDTH)
    bit = column * C.bits
    first = at[:, None] * BYTES + (bit // 8)[None, :]
    words = tl.load(codes + first, mask=inside[:, None], other=0).to(tl.int32)
    if C.bits == 6:  # a code may reach into the next byte
        more = (bit % 8 + C.bits > 8)[None, :] & inside[:, None]
        words |= tl.load(codes + first + 1, mask=more, other=0).to(tl.int32) << 8
    found = words >> (bit % 8)[None, :] & ((1 << C.bits) - 1)
    block = at[:, None] * (WIDTH // BLOCK) + tl.arange(0, WIDTH // BLOCK)[None, :]
    scale = tl.load(scales + block, mask=inside[:, None], other=127).to(tl.int32)
    factors = tl.reshape(factor(tl.reshape(scale, [scale.numel]), tl.reshape(scale != NAN_SCALE, [scale.numel]), C),
                         [at.numel, WIDTH // BLOCK, 1])  # fmt: skip
    values = tl.reshape(decode(found, C), [at.numel, WIDTH // BLOCK, BLOCK]) * factors
    return tl.reshape(values, [at.numel, WIDTH])


@triton.jit
def join_kernel(
    sums, limits, out, pairs, parts, rows,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """What `attend_kernel` gives -> out: (pairs, rows, VALUE_WIDTH)."""
    pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, PARTS)
    at = (part.to(tl.int64) * pairs + pair) * ROWS + row
    largest = tl.load(limits + at, mask=part < parts, other=float("-inf"))
    whole = tl.load(limits + parts * pairs * ROWS + at, mask=part < parts, other=0.0)
    most = tl.max(largest, 0)
    weights = tl.exp(largest - tl.where(most == float("-inf"), 0.0, most))
    weights = tl.where(part < parts, weights, 0.0)
    total = tl.sum(whole * weights, 0)
    column = tl.arange(0, VALUE_WIDTH)
    each = tl.load(sums + at[:, None] * VALUE_WIDTH + column[None, :], mask=(part < parts)[:, None], other=0.0)
    found = tl.sum(each * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + (pair * rows + row) * VALUE_WIDTH + column, found.to(out.dtype.element_ty))
