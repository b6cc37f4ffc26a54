"""The Triton kernel of attention over values that bfloat16 represents, in float32 or in bfloat16.

A program keeps BLOCK_M queries and loops over all keys, BLOCK_N at a time, with the online softmax of flash attention
(Dao et al., 2022). m_i is the largest score so far, l_i the sum of softmax weights, acc the sum of weighted values. For
float32 results, a softmax weight p is split into a sum of three bfloat16 numbers, so that its products with the values
are exact on the tensor cores. For bfloat16 results, p is rounded to bfloat16, as in torch. The kernel may quantize its
results before it stores them; each row then has whole blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pt2mx.kernels.gpu.scales import fake_quantized


class Strided(NamedTuple):
    """A tensor (batch, heads, rows, columns) and its strides; the column stride is 1, except for a mask."""

    pointer: Any
    batch: int
    head: int
    row: int
    column: int = 1


class Sizes(NamedTuple):
    """The compile-time values of the kernel."""

    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int  # powers of two not below the dims
    BLOCK_V: int
    BLOCK_M: int  # queries of a program
    BLOCK_N: int  # keys at a time
    CAUSAL: bool
    MASK: str  # "none", "bool", or "added": floats
    MASK_ROWS: bool  # the mask is not the same for all queries
    EVEN_N: bool  # BLOCK_N divides the keys
    EXACT: bool  # in float32


@triton.jit
def dense_attention_kernel(q, k, v, mask, out, sm_scale, sizes, S: tl.constexpr, C: tl.constexpr):
    """q: (batch, heads, queries, HEAD_DIM), k: (batch, heads / group, keys, HEAD_DIM), v: (.., keys, VALUE_DIM)
    bfloat16, mask: booleans or floats -> out: (batch, queries, heads, VALUE_DIM), rounded to fp32 if EXACT, else to
    bfloat16, then quantized by C unless that is None."""
    queries, keys, heads, group = sizes
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    offs_m = tl.program_id(1) * S.BLOCK_M + tl.arange(0, S.BLOCK_M)
    offs_d, offs_v, offs_n = tl.arange(0, S.BLOCK_D), tl.arange(0, S.BLOCK_V), tl.arange(0, S.BLOCK_N)
    inside = offs_m < queries
    q_ptrs = q.pointer + batch * q.batch + head * q.head
    q_ptrs = q_ptrs + offs_m.to(tl.int64)[:, None] * q.row + offs_d[None, :]
    q_tile = tl.load(q_ptrs, mask=inside[:, None] & (offs_d < S.HEAD_DIM)[None, :], other=0.0)
    k_ptrs = k.pointer + batch * k.batch + head // group * k.head + offs_d[:, None]
    v_ptrs = v.pointer + batch * v.batch + head // group * v.head + offs_v[None, :]
    mask_ptrs = mask.pointer + batch * mask.batch + head * mask.head
    if S.MASK_ROWS:
        mask_ptrs += offs_m.to(tl.int64)[:, None] * mask.row
    # 2**x takes one instruction less than e**x. An additive mask does not allow this: its lowest values would overflow
    if S.MASK != "added":
        sm_scale *= 1.4426950408889634
    m_i = tl.full([S.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.full([S.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([S.BLOCK_M, S.BLOCK_V], 0.0, tl.float32)
    end = keys
    if S.CAUSAL:
        end = tl.minimum(keys, (tl.program_id(1) + 1) * S.BLOCK_M)
    for start_n in tl.range(0, end, S.BLOCK_N):
        offs = (start_n + offs_n).to(tl.int64)
        is_key = (start_n + offs_n < keys) | S.EVEN_N
        k_tile = tl.load(
            k_ptrs + offs[None, :] * k.row, mask=is_key[None, :] & (offs_d < S.HEAD_DIM)[:, None], other=0.0
        )
        v_tile = tl.load(
            v_ptrs + offs[:, None] * v.row, mask=is_key[:, None] & (offs_v < S.VALUE_DIM)[None, :], other=0.0
        )
        qk = tl.dot(q_tile, k_tile) * sm_scale
        if S.MASK != "none":
            has = inside[:, None] & is_key[None, :] if S.MASK_ROWS else is_key[None, :]
            mask_tile = tl.load(mask_ptrs + offs[None, :] * mask.column, mask=has, other=0)
            if S.MASK == "bool":
                qk = tl.where(mask_tile != 0, qk, float("-inf"))
            else:
                qk += mask_tile
        if S.CAUSAL:
            qk = tl.where(offs_m[:, None] >= start_n + offs_n[None, :], qk, float("-inf"))
        if not S.EVEN_N:
            qk = tl.where(is_key[None, :], qk, float("-inf"))
        m_i, l_i, acc = online_softmax(m_i, l_i, acc, qk, v_tile, S)
    acc = quantized(acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None], S, C)
    out_ptrs = out + ((batch * queries + offs_m)[:, None] * heads + head) * S.VALUE_DIM + offs_v[None, :]
    tl.store(out_ptrs, acc, mask=inside[:, None] & (offs_v < S.VALUE_DIM)[None, :])


@triton.jit
def online_softmax(m_i, l_i, acc, qk, v, S: tl.constexpr):
    """Add the values v: (BLOCK_N, BLOCK_V), weighted by the softmax of their scores qk: (BLOCK_M, BLOCK_N)."""
    m_new = tl.maximum(m_i, tl.max(qk, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    if S.MASK == "added":
        p = tl.exp(qk - shift[:, None])
        alpha = tl.exp(m_i - shift)
    else:
        p = tl.exp2(qk - shift[:, None])
        alpha = tl.exp2(m_i - shift)
    high = p.to(tl.bfloat16)
    if S.EXACT:
        less = p - high.to(tl.float32)
        middle = less.to(tl.bfloat16)
        low = (less - middle.to(tl.float32)).to(tl.bfloat16)
        lower = tl.dot(middle, v, tl.dot(low, v))
        acc = acc * alpha[:, None] + (tl.dot(high, v) + lower)
    else:
        acc = tl.dot(high, v, acc * alpha[:, None])
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def quantized(acc, S: tl.constexpr, C: tl.constexpr):
    if C is not None:
        DTYPE: tl.constexpr = tl.float32 if S.EXACT else tl.bfloat16
        blocks = tl.reshape(acc.to(DTYPE).to(tl.float32), [S.BLOCK_M * S.BLOCK_V // C.block, C.block])
        acc = tl.reshape(fake_quantized(blocks, None, None, None, C).to(DTYPE), [S.BLOCK_M, S.BLOCK_V])
    return acc
