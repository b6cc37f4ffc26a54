"""The device code of attention over packed keys and values, in Triton.

Tensor cores multiply codes' values without their scales: a block's scale multiplies the score of its part of a key, and
the weight of its part of a value, of which there are fewer. Elements have 8 significant bits at most, which bfloat16
and float16 hold.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from pt2mx.kernels.gpu.blocks import NAN_SCALE, decode, factor


class Elements(NamedTuple):
    """The compile-time values of an element: fields of `ElementFormat`. `special`: some codes are no numbers;
    `converts`: the device has an instruction for its values."""

    bits: int
    mantissa_bits: int
    bias: int
    emin: int
    max_normal: float
    is_int: bool
    special: bool
    converts: bool


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
    column = tl.arange(0, BLOCK)
    inside = row < rows
    q = ()
    for i in tl.static_range(tl.constexpr(WIDTH // BLOCK)):
        own = (pair * rows + row[:, None]) * WIDTH + BLOCK * i + column[None, :]
        q = q + (tl.load(query + own, mask=inside[:, None], other=0.0),)
    head = pair % heads * (rows // queries) + row // queries
    seen_by = mask + pair // heads * mask_batch + head * mask_head + row % queries * mask_query
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    whole = tl.zeros([ROWS], tl.float32)
    total = ()
    for _ in tl.static_range(tl.constexpr(VALUE_WIDTH // VALUE_BLOCK)):
        total = total + (tl.zeros([ROWS, VALUE_BLOCK], tl.float32),)
    for block in tl.range(part * blocks, tl.minimum((part + 1) * blocks, tl.cdiv(slots, SLOTS)), num_stages=3):
        slot = block * SLOTS + tl.arange(0, SLOTS)
        there = slot < slots
        at = pair * slots + slot
        scores = tl.zeros([ROWS, SLOTS], tl.float32)
        for i in tl.static_range(tl.constexpr(WIDTH // BLOCK)):
            k = elements(key, at, there, i, WIDTH, BLOCK, query.dtype.element_ty, C)
            factors = factors_of(key_scale, at, there, i, WIDTH // BLOCK, C)
            scores += tl.dot(q[i], tl.trans(k)) * factors[None, :]
        seen = inside[:, None] & there[None, :]
        if MASKED:
            seen &= tl.load(seen_by[:, None] + slot[None, :] * mask_slot, mask=seen, other=0) != 0
        scores = tl.where(seen, scores * scale, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(most == float("-inf"), 0.0, most)
        weights = tl.exp(scores - shift[:, None])
        before = tl.exp(largest - shift)
        new = ()
        for i in tl.static_range(tl.constexpr(VALUE_WIDTH // VALUE_BLOCK)):
            v = elements(value, at, there, i, VALUE_WIDTH, VALUE_BLOCK, query.dtype.element_ty, C)
            factors = factors_of(value_scale, at, there, i, VALUE_WIDTH // VALUE_BLOCK, C)
            of_block = (weights * factors[None, :]).to(query.dtype.element_ty)
            new = new + (total[i] * before[:, None] + tl.dot(of_block, v),)
        total = new
        whole = whole * before + tl.sum(weights, 1)
        largest = most
    first = (part * pairs + pair) * ROWS
    tl.store(limits + first + row, largest)
    tl.store(limits + parts * pairs * ROWS + first + row, whole)
    wide = tl.arange(0, VALUE_BLOCK)
    for i in tl.static_range(tl.constexpr(VALUE_WIDTH // VALUE_BLOCK)):
        tl.store(sums + (first + row[:, None]) * VALUE_WIDTH + VALUE_BLOCK * i + wide[None, :], total[i])


@triton.jit
def factors_of(scales, at, there, i, COUNT: tl.constexpr, C: tl.constexpr):
    """The factors of the elements of block `i` of the rows `at`, (len(at),) fp32."""
    scale = tl.load(scales + at * COUNT + i, mask=there, other=127).to(tl.int32)
    found = tl.reshape(factor(scale, scale != NAN_SCALE, C), [at.numel])
    if C.is_int:  # elements are whole numbers here
        found *= 2.0**-C.mantissa_bits
    return found


@triton.jit
def elements(codes, at, there, i, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, C: tl.constexpr):
    """codes: (n, bytes of WIDTH) -> (len(at), BLOCK), the elements of block `i` of the rows `at`."""
    first = (at * (WIDTH * C.bits // 8))[:, None] + BLOCK * C.bits // 8 * i
    inside = there[:, None]
    if C.bits == 8:
        found = tl.load(codes + first + tl.arange(0, BLOCK)[None, :], mask=inside, other=0)
    elif C.bits == 4:
        pairs = tl.load(codes + first + tl.arange(0, BLOCK // 2)[None, :], mask=inside, other=0)
        found = tl.reshape(tl.join(pairs & 15, pairs >> 4), [at.numel, BLOCK])
    else:  # a code may reach into the next byte
        bit = tl.arange(0, BLOCK) * C.bits
        more = (bit % 8 + C.bits > 8)[None, :] & inside
        words = tl.load(codes + first + (bit // 8)[None, :], mask=inside, other=0).to(tl.int32)
        words |= tl.load(codes + first + (bit // 8)[None, :] + 1, mask=more, other=0).to(tl.int32) << 8
        found = words >> (bit % 8)[None, :] & ((1 << C.bits) - 1)
    if C.is_int and C.bits == 8:
        values = found.to(tl.int8, bitcast=True).to(tl.float32)
    elif C.converts:
        if C.mantissa_bits == 3:
            values = found.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            values = found.to(tl.float8e5, bitcast=True).to(tl.float16)
    else:
        values = decode(found.to(tl.int32), C)
    return values.to(DTYPE)


@triton.jit
def join_kernel(
    sums, limits, out, pairs, parts, rows,
    PARTS: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """sums, limits: of `attend_kernel` -> out: (pairs, rows, VALUE_WIDTH)."""
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
