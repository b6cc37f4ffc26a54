"""The Triton kernel of attention over values that bfloat16 holds, in float32 or in bfloat16.

A program keeps some queries and goes over all keys, with the softmax adapted to each larger score (flash attention: Dao
et al., 2022). A weight in float32 is the sum of three bfloat16, so that its products with the values are exact on the
tensor cores too; for results in bfloat16 it is rounded to one, as torch's are. Results may be quantized before they
are stored: a row has whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pt2mx.kernels.gpu.blocks import fake_quantized


@triton.jit
def dense_attention_kernel(
    query, key, value, mask, out, factor, queries, keys, heads, group,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    mask_batch, mask_head, mask_query, mask_key,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """query: (batch, heads, queries, WIDTH), key: (batch, heads / group, keys, WIDTH), value: (.., keys, VALUE_WIDTH)
    bfloat16, mask: booleans, or floats that are added, by the strides -> out: (batch, queries, heads, VALUE_WIDTH),
    rounded to fp32 if EXACT, else to bfloat16, then quantized by C unless that is None. MASK: "none", "seen" or
    "added"; MASK_ROWS: not the same for all queries. WHOLE: `keys` is a multiple of KEYS. COLUMNS, VALUE_COLUMNS:
    powers of two not below the widths."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column, wide, slot = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS), tl.arange(0, KEYS)
    there = row < queries
    own = query + batch * query_batch + head * query_head + row.to(tl.int64)[:, None] * query_row + column[None, :]
    q = tl.load(own, mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)
    of_key = key + batch * key_batch + head // group * key_head + column[:, None]
    of_value = value + batch * value_batch + head // group * value_head + wide[None, :]
    of_mask = mask + batch * mask_batch + head * mask_head
    if MASK_ROWS:
        of_mask += row.to(tl.int64)[:, None] * mask_query
    # powers of two take an instruction less than those of e; the least numbers of a mask that is added allow none
    if MASK != "added":
        factor *= 1.4426950408889634
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    whole = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(1) + 1) * ROWS)
    for first in tl.range(0, end, KEYS):
        at = (first + slot).to(tl.int64)
        known = (first + slot < keys) | WHOLE
        k = tl.load(of_key + at[None, :] * key_row, mask=known[None, :] & (column < WIDTH)[:, None], other=0.0)
        v = tl.load(of_value + at[:, None] * value_row, mask=known[:, None] & (wide < VALUE_WIDTH)[None, :], other=0.0)
        scores = tl.dot(q, k) * factor
        if MASK != "none":
            has = there[:, None] & known[None, :] if MASK_ROWS else known[None, :]
            given = tl.load(of_mask + at[None, :] * mask_key, mask=has, other=0)
            if MASK == "seen":
                scores = tl.where(given != 0, scores, float("-inf"))
            else:
                scores += given
        if CAUSAL:
            scores = tl.where(row[:, None] >= first + slot[None, :], scores, float("-inf"))
        if not WHOLE:
            scores = tl.where(known[None, :], scores, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(most == float("-inf"), 0.0, most)
        if MASK == "added":
            weights = tl.exp(scores - shift[:, None])
            before = tl.exp(largest - shift)
        else:
            weights = tl.exp2(scores - shift[:, None])
            before = tl.exp2(largest - shift)
        high = weights.to(tl.bfloat16)
        if EXACT:
            rest = weights - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            rest = tl.dot(middle, v, tl.dot(low, v))
            total = total * before[:, None] + (tl.dot(high, v) + rest)
        else:
            total = tl.dot(high, v, total * before[:, None])
        whole = whole * before + tl.sum(weights, 1)
        largest = most
    found = total / tl.where(whole == 0.0, 1.0, whole)[:, None]
    if C is not None:
        DTYPE: tl.constexpr = tl.float32 if EXACT else tl.bfloat16
        blocks = tl.reshape(found.to(DTYPE).to(tl.float32), [ROWS * VALUE_COLUMNS // C.block, C.block])
        found = tl.reshape(fake_quantized(blocks, None, None, C).to(DTYPE), [ROWS, VALUE_COLUMNS])
    to = out + ((batch * queries + row)[:, None] * heads + head) * VALUE_WIDTH + wide[None, :]
    tl.store(to, found, mask=there[:, None] & (wide < VALUE_WIDTH)[None, :])
