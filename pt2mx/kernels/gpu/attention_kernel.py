"""The device code of attention over packed keys and values, in Triton: flash-decoding.

    slots of a cache   | split 0  | split 1  | split 2  | ...   a program for each split of each head of the keys
    attend_kernel      m, l, acc  m, l, acc  m, l, acc          the online softmax of a split
    join_kernel        the weighted sum of acc over the weighted sum of l -> out; weights exp(m - largest m)

With counters there is no second kernel: the last program of a head joins its splits.

Tensor cores multiply elements without their scales. The scale of a key's block multiplies the block's part of the
score, and the scale of a value's block multiplies the softmax weight, because there are fewer scales than elements.
Elements have 8 significant bits at most, which bfloat16 and float16 represent. Blocks of 16 would make small matmuls:
several are scaled first, and multiplied together.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pt2mx.kernels.gpu.blocks import NAN_SCALE, decode, factor
from pt2mx.kernels.gpu.float_scales import ScaleConstants, value_of


class Elements(NamedTuple):
    """The compile-time values of an element: fields of `ElementFormat`. `special`: some codes are no numbers;
    `converts`: the device has an instruction for its values; `shift`: the exponent that the factors of values gain, so
    that float16 represents a weight times a factor; `scale`: of scales with a significand."""

    bits: int
    mantissa_bits: int
    bias: int
    emin: int
    max_normal: float
    is_int: bool
    special: bool
    converts: bool
    shift: int
    scale: ScaleConstants | None


class Sizes(NamedTuple):
    """The compile-time sizes of a program: rows are the queries that read one head of the keys."""

    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_M: int  # rows, padded
    BLOCK_N: int  # slots at a time
    K_BLOCK: int  # values of a key in a tile: an MX block, or with SCALED several of them
    V_BLOCK: int
    MASKED: bool
    SCALED: int = 0  # values of an MX block that is scaled before it is multiplied; 0: the scale multiplies results
    JOINED: int = 0  # the most splits that the last program of a pair joins; 0: it joins none
    use_pdl: bool = False


@triton.jit
def attend_kernel(q, k, v, mask, partial, joined, sm_scale, sizes, mask_strides, S: tl.constexpr, C: tl.constexpr):
    """q: (pairs, rows, HEAD_DIM), k, v: codes (pairs, slots, bytes) and scales, mask: booleans by the strides ->
    partial: acc (splits, pairs, BLOCK_M, VALUE_DIM), m and l (2, splits, pairs, BLOCK_M). A split has `blocks` times
    BLOCK_N slots, `heads` are heads of the keys, and a pair is a sequence and one of its heads.

    joined: out (pairs, rows, VALUE_DIM), and int32 zeros (pairs), which count programs that have stored their part and
    are zeros again afterwards."""
    if S.use_pdl:
        gdc_launch_dependents()
        gdc_wait()
    rows, queries, heads, slots, blocks = sizes
    split, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_m = tl.arange(0, S.BLOCK_M)
    q_blocks = load_queries(q, pair, rows, S)
    mask_batch, mask_head, mask_query, mask_slot = mask_strides
    head = pair % heads * (rows // queries) + offs_m // queries
    mask_rows = mask + pair // heads * mask_batch + head * mask_head + offs_m % queries * mask_query
    m_i = tl.full([S.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.full([S.BLOCK_M], 0.0, tl.float32)
    acc = ()
    for _ in tl.static_range(tl.constexpr(S.VALUE_DIM // S.V_BLOCK)):
        acc = acc + (tl.full([S.BLOCK_M, S.V_BLOCK], 0.0, tl.float32),)
    for block in tl.range(split * blocks, tl.minimum((split + 1) * blocks, tl.cdiv(slots, S.BLOCK_N)), num_stages=3):
        offs_n = block * S.BLOCK_N + tl.arange(0, S.BLOCK_N)
        in_cache = offs_n < slots
        qk = scores(q_blocks, k, pair * slots + offs_n, in_cache, S, C)
        seen = (offs_m < rows)[:, None] & in_cache[None, :]
        if S.MASKED:
            seen &= tl.load(mask_rows[:, None] + offs_n[None, :] * mask_slot, mask=seen, other=0) != 0
        qk = tl.where(seen, qk * sm_scale, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(qk - shift[:, None])
        alpha = tl.exp(m_i - shift)
        acc = accumulate_pv(acc, alpha, p, v, pair * slots + offs_n, in_cache, q.dtype.element_ty, S, C)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
    store_partial(partial, m_i, l_i, acc, split, pair, S, C)
    if S.JOINED > 0:
        out, counters = joined
        tl.debug_barrier()
        splits = tl.num_programs(0)
        if tl.atomic_add(counters + pair, 1) == splits - 1:
            tl.store(counters + pair, 0)
            join_splits(partial, out, pair, rows, splits, S)


@triton.jit
def load_queries(q, pair, rows, S: tl.constexpr):
    """Load the queries of a pair, a tile (BLOCK_M, K_BLOCK) for each block of a key."""
    offs_m, offs_k = tl.arange(0, S.BLOCK_M), tl.arange(0, S.K_BLOCK)
    tiles = ()
    for i in tl.static_range(tl.constexpr(S.HEAD_DIM // S.K_BLOCK)):
        offs = (pair * rows + offs_m[:, None]) * S.HEAD_DIM + S.K_BLOCK * i + offs_k[None, :]
        tiles = tiles + (tl.load(q + offs, mask=(offs_m < rows)[:, None], other=0.0),)
    return tiles


@triton.jit
def scores(q_blocks, k, offs, in_cache, S: tl.constexpr, C: tl.constexpr):
    """Return QK^T of the queries and the keys at `offs`, (BLOCK_M, BLOCK_N) fp32."""
    codes, scales = k
    qk = tl.full([S.BLOCK_M, S.BLOCK_N], 0.0, tl.float32)
    for i in tl.static_range(tl.constexpr(S.HEAD_DIM // S.K_BLOCK)):
        if S.SCALED > 0:
            tile = scaled_elements(k, offs, in_cache, i, S.HEAD_DIM, S.K_BLOCK, q_blocks[i].dtype, S, C)
            qk += tl.dot(q_blocks[i], tl.trans(tile))
        else:
            tile = elements(codes, offs, in_cache, i, S.HEAD_DIM, S.K_BLOCK, q_blocks[i].dtype, C)
            factors = factors_of(scales, offs, in_cache, i, S.HEAD_DIM // S.K_BLOCK, C)
            qk += tl.dot(q_blocks[i], tl.trans(tile)) * factors[None, :]
    return qk


@triton.jit
def accumulate_pv(acc, alpha, p, v, offs, in_cache, DTYPE: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Return acc * alpha + p @ the values at `offs` times 2**C.shift, a tile (BLOCK_M, V_BLOCK) for each block."""
    codes, scales = v
    new = ()
    for i in tl.static_range(tl.constexpr(S.VALUE_DIM // S.V_BLOCK)):
        if S.SCALED > 0:
            tile, p_block = scaled_elements(v, offs, in_cache, i, S.VALUE_DIM, S.V_BLOCK, DTYPE, S, C), p.to(DTYPE)
        else:
            tile = elements(codes, offs, in_cache, i, S.VALUE_DIM, S.V_BLOCK, DTYPE, C)
            factors = factors_of(scales, offs, in_cache, i, S.VALUE_DIM // S.V_BLOCK, C) * 2.0**C.shift
            p_block = (p * factors[None, :]).to(DTYPE)
        new = new + (acc[i] * alpha[:, None] + tl.dot(p_block, tile),)
    return new


@triton.jit
def store_partial(partial, m_i, l_i, acc, split, pair, S: tl.constexpr, C: tl.constexpr):
    acc_out, ml_out = partial
    splits, pairs = tl.num_programs(0), tl.num_programs(1)
    first, offs_m, offs_v = (split * pairs + pair) * S.BLOCK_M, tl.arange(0, S.BLOCK_M), tl.arange(0, S.V_BLOCK)
    tl.store(ml_out + first + offs_m, m_i)
    tl.store(ml_out + splits * pairs * S.BLOCK_M + first + offs_m, l_i)
    for i in tl.static_range(tl.constexpr(S.VALUE_DIM // S.V_BLOCK)):
        at = (first + offs_m[:, None]) * S.VALUE_DIM + S.V_BLOCK * i + offs_v[None, :]
        tl.store(acc_out + at, acc[i] * 2.0**-C.shift)


@triton.jit
def join_splits(partial, out, pair, rows, splits, S: tl.constexpr):
    """Store the weighted sum of acc over the weighted sum of l, of all rows of a pair, in the order of the splits."""
    acc_in, ml_in = partial
    pairs, offs_m, offs_v = tl.num_programs(1), tl.arange(0, S.BLOCK_M), tl.arange(0, S.VALUE_DIM)
    m_max = tl.full([S.BLOCK_M], float("-inf"), tl.float32)
    for i in tl.static_range(tl.constexpr(S.JOINED)):
        offs = (i * pairs + pair) * S.BLOCK_M + offs_m
        m_max = tl.maximum(m_max, tl.load(ml_in + offs, mask=(offs_m >= 0) & (i < splits), other=float("-inf")))
    m_max = tl.where(m_max == float("-inf"), 0.0, m_max)
    l_sum = tl.full([S.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([S.BLOCK_M, S.VALUE_DIM], 0.0, tl.float32)
    for i in tl.static_range(tl.constexpr(S.JOINED)):
        offs, inside = (i * pairs + pair) * S.BLOCK_M + offs_m, (offs_m >= 0) & (i < splits)
        weight = tl.exp(tl.load(ml_in + offs, mask=inside, other=float("-inf")) - m_max)
        l_sum += weight * tl.load(ml_in + splits * pairs * S.BLOCK_M + offs, mask=inside, other=0.0)
        part = tl.load(acc_in + offs[:, None] * S.VALUE_DIM + offs_v[None, :], mask=inside[:, None], other=0.0)
        acc += weight[:, None] * part
    acc = acc / tl.where(l_sum == 0, 1.0, l_sum)[:, None]
    at = (pair * rows + offs_m[:, None]) * S.VALUE_DIM + offs_v[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(offs_m < rows)[:, None])


@triton.jit
def scaled_elements(
    cache, offs, in_cache, i, DIM: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, S: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """cache: codes and scales of (n, DIM) -> (len(offs), TILE), the values of tile `i` of the rows `offs`, rounded to
    DTYPE."""
    codes, scales = cache
    COUNT: tl.constexpr = TILE // S.SCALED
    block = i * COUNT + tl.arange(0, COUNT)
    factors = factors_of(scales, offs[:, None], in_cache[:, None], block[None, :], DIM // S.SCALED, C)
    blocks = tl.reshape(elements(codes, offs, in_cache, i, DIM, TILE, tl.float32, C), [offs.numel, COUNT, S.SCALED])
    return tl.reshape(blocks * factors[:, :, None], [offs.numel, TILE]).to(DTYPE)


@triton.jit
def factors_of(scales, offs, in_cache, i, COUNT: tl.constexpr, C: tl.constexpr):
    """Return the scale factors of block `i` of the rows `offs`, fp32, in the shape of both."""
    scale = tl.load(scales + offs * COUNT + i, mask=in_cache, other=0).to(tl.int32)
    if C.scale is not None:
        factors = value_of(scale, C)
    else:
        factors = tl.reshape(factor(scale, scale != NAN_SCALE, C), scale.shape)
    if C.is_int:  # elements are whole numbers here
        factors *= 2.0**-C.mantissa_bits
    return factors


@triton.jit
def elements(codes, offs, in_cache, i, DIM: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, C: tl.constexpr):
    """codes: (n, bytes of DIM) -> (len(offs), BLOCK), the elements of block `i` of the rows `offs`."""
    first = (offs * (DIM * C.bits // 8))[:, None] + BLOCK * C.bits // 8 * i
    inside = in_cache[:, None]
    if C.bits == 8:
        unpacked = tl.load(codes + first + tl.arange(0, BLOCK)[None, :], mask=inside, other=0)
    elif C.bits == 4:
        pairs = tl.load(codes + first + tl.arange(0, BLOCK // 2)[None, :], mask=inside, other=0)
        unpacked = tl.reshape(tl.join(pairs & 15, pairs >> 4), [offs.numel, BLOCK])
    else:  # a code may reach into the next byte
        bit = tl.arange(0, BLOCK) * C.bits
        more = (bit % 8 + C.bits > 8)[None, :] & inside
        words = tl.load(codes + first + (bit // 8)[None, :], mask=inside, other=0).to(tl.int32)
        words |= tl.load(codes + first + (bit // 8)[None, :] + 1, mask=more, other=0).to(tl.int32) << 8
        unpacked = words >> (bit % 8)[None, :] & ((1 << C.bits) - 1)
    if C.is_int and C.bits == 8:
        values = unpacked.to(tl.int8, bitcast=True).to(tl.float32)
    elif C.converts:
        if C.mantissa_bits == 3:
            values = unpacked.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            values = unpacked.to(tl.float8e5, bitcast=True).to(tl.float16)
    else:
        values = decode(unpacked.to(tl.int32), C)
    return values.to(DTYPE)


@triton.jit
def join_kernel(partial, out, pairs, splits, rows, SPLITS: tl.constexpr, S: tl.constexpr):
    """partial: of `attend_kernel` -> out: (pairs, rows, VALUE_DIM); SPLITS: a power of two not below `splits`."""
    partial_acc, partial_ml = partial
    pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    offs = (split.to(tl.int64) * pairs + pair) * S.BLOCK_M + row
    m = tl.load(partial_ml + offs, mask=split < splits, other=float("-inf"))
    l = tl.load(partial_ml + splits * pairs * S.BLOCK_M + offs, mask=split < splits, other=0.0)  # noqa: E741
    m_max = tl.max(m, 0)
    alpha = tl.exp(m - tl.where(m_max == float("-inf"), 0.0, m_max))
    alpha = tl.where(split < splits, alpha, 0.0)
    l_sum = tl.sum(l * alpha, 0)
    offs_v = tl.arange(0, S.VALUE_DIM)
    acc_ptrs = partial_acc + offs[:, None] * S.VALUE_DIM + offs_v[None, :]
    acc = tl.load(acc_ptrs, mask=(split < splits)[:, None], other=0.0)
    acc = tl.sum(acc * alpha[:, None], 0) / tl.where(l_sum == 0, 1.0, l_sum)
    tl.store(out + (pair * rows + row) * S.VALUE_DIM + offs_v, acc.to(out.dtype.element_ty))
