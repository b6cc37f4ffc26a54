"""The device code of attention over a cache for a few bfloat16 queries, in Gluon. Codes are decoded in registers.

A warp takes 16 slots of the cache at a time, and multiplies twice with `mma.m16n8k16`. Lane 4 * g + t holds:

                        rows                  columns             the other operand
    scores  K @ q^T     slots g, g + 8        queries 2t, 2t + 1  8 values of each 32 of a key: 8t to 8t + 7
    result  V^T @ p^T   values 4g to 4g + 3   queries 2t, 2t + 1  slots 2t, 2t + 1, 2t + 8, 2t + 9
                        of each 32

The order of the values along the sum is free, so each code is loaded by the lane that multiplies it, and decoded once.
Probabilities pass from the columns of the first result to the second operand by a transpose of 8 x 8 values. The scale
of a key's block multiplies its part of the score, and the scale of a value's block the probability: all rows of an
`mma` are in one block. Keys and values of bfloat16 have no scales. Tensors are (warps, 32), a register a lane.

The last program of a pair joins the results of its splits, if they are few: no other kernel has to start for it.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pt2mx.kernels.gpu.flash_decoding_lanes import (
    decode_eight,
    factor_of_byte,
    four,
    load_keys,
    load_queries,
    load_values,
    times_factors,
    words_of_eight,
)
from pt2mx.kernels.gpu.fragment import pdl_launch_dependents, pdl_wait

_LOG2_E, _LN_2 = gl.constexpr(1.4426950408889634), gl.constexpr(0.6931471805599453)


class DecodingSizes(NamedTuple):
    """The compile-time values of a program."""

    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_M: int  # rows of `partial`
    K_BLOCK: int  # values of an MX block of a key
    V_BLOCK: int
    BITS: int  # of a code; 16: bfloat16
    MASKED: bool
    WARPS: int
    TILES: int  # of 16 slots that a warp takes at a time
    ptx: str = ""  # of `mma_decode.decode_eight_ptx`
    JOINED: int = 0  # the most splits that the last program joins; 0: it joins none
    use_pdl: bool = False


@gluon.jit(do_not_specialize=["sm_scale", "rows", "queries", "heads", "slots", "slots_of_warp"])
def decode_attention_kernel(
    q, k, v, mask, partial, joined, sm_scale, rows, queries, heads, slots, slots_of_warp, mask_strides, S: gl.constexpr
):
    """q: (pairs, rows, HEAD_DIM) bfloat16 of up to 8 rows, k, v: codes (pairs, slots, bytes) and scales, mask: booleans
    by the strides -> partial, as of `attend_kernel`; a program is a split.

    joined: out (pairs, rows, VALUE_DIM), and int32 zeros (pairs), which count programs that have stored their part and
    are zeros again afterwards."""
    pdl_launch_dependents(S)
    pdl_wait(S)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [S.WARPS, 1], [1, 0])
    lane = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    warp = gl.arange(0, S.WARPS, gl.SliceLayout(1, layout))[:, None]
    g, t = lane // 4 + warp * 0, lane % 4 + warp * 0
    pair = gl.program_id(1).to(gl.int64)
    q_pairs = load_queries(q, pair, rows, g, t, S)
    row = 2 * t
    mask_batch, mask_head, mask_query, mask_slot = mask_strides
    of_pair = mask + pair // heads * mask_batch + pair % heads * (rows // queries) * mask_head
    mask_0 = of_pair + row // queries * mask_head + row % queries * mask_query
    mask_1 = of_pair + (row + 1) // queries * mask_head + (row + 1) % queries * mask_query
    zero = gl.full([S.WARPS, 32], 0.0, gl.float32, layout)
    m_0 = gl.full([S.WARPS, 32], float("-inf"), gl.float32, layout)
    m_1, l_0, l_1, acc = m_0, zero, zero, ()
    for _ in gl.static_range(gl.constexpr(S.VALUE_DIM // 4)):
        acc = acc + (zero,)
    first = (gl.program_id(0) * S.WARPS + warp) * slots_of_warp + lane * 0
    for start in range(0, slots_of_warp, 16 * S.TILES):
        keys, values, scores = (), (), ()
        for i in gl.static_range(gl.constexpr(S.TILES)):
            keys = keys + (load_keys(k, pair * slots, first + (start + 16 * i), slots, g, t, S),)
        for i in gl.static_range(gl.constexpr(S.TILES)):
            values = values + (load_values(v, pair * slots, first + (start + 16 * i), slots, g, t, S),)
        new_0, new_1 = m_0, m_1
        for i in gl.static_range(gl.constexpr(S.TILES)):
            slot = first + (start + 16 * i) + g
            s = _scores(keys[i], q_pairs, zero, S)
            s = _masked(s, sm_scale * _LOG2_E, slot, slots, row, rows, mask_0, mask_1, mask_slot, S)
            new_0 = gl.maximum(new_0, gl.maximum(s[0], s[2]))
            new_1 = gl.maximum(new_1, gl.maximum(s[1], s[3]))
            scores = scores + s
        new_0, new_1 = _over_slots("max", new_0), _over_slots("max", new_1)
        shift_0 = gl.where(new_0 == float("-inf"), 0.0, new_0)
        shift_1 = gl.where(new_1 == float("-inf"), 0.0, new_1)
        alpha_0, alpha_1 = gl.exp2(m_0 - shift_0), gl.exp2(m_1 - shift_1)
        m_0, m_1 = new_0, new_1
        l_0, l_1 = l_0 * alpha_0, l_1 * alpha_1
        rescaled = ()
        for i in gl.static_range(gl.constexpr(S.VALUE_DIM // 8)):
            rescaled = rescaled + (acc[2 * i] * alpha_0, acc[2 * i + 1] * alpha_1)
        acc = rescaled
        for i in gl.static_range(gl.constexpr(S.TILES)):
            p_0, p_1 = gl.exp2(scores[4 * i] - shift_0), gl.exp2(scores[4 * i + 1] - shift_1)
            p_2, p_3 = gl.exp2(scores[4 * i + 2] - shift_0), gl.exp2(scores[4 * i + 3] - shift_1)
            l_0, l_1 = l_0 + (p_0 + p_2), l_1 + (p_1 + p_3)
            acc = _add_values(acc, _transposed(p_0, p_1), _transposed(p_2, p_3), values[i], S)
    _store_partial(partial, m_0, m_1, _over_slots("add", l_0), _over_slots("add", l_1), acc, pair, S)
    if S.JOINED > 0:
        out, counters = joined
        gl.thread_barrier()
        splits = gl.num_programs(0)
        if gl.atomic_add(counters + pair, 1) == splits - 1:
            gl.store(counters + pair, 0)
            _join(partial, out, pair, rows, splits, S)


# --- matmuls ---


@gluon.jit
def _mma(a, b, c):
    asm: gl.constexpr = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints: gl.constexpr = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return gl.inline_asm_elementwise(asm, constraints, a + b + c, four(gl.float32), True, 1)


@gluon.jit
def _scores(keys, q_pairs, zero, S: gl.constexpr):
    """Return K @ q^T: slots g and g + 8, queries 2t and 2t + 1 each."""
    words, factors = keys
    count: gl.constexpr = words_of_eight(S)
    s = (zero, zero, zero, zero)
    for b in gl.static_range(gl.constexpr(S.HEAD_DIM // 32)):
        top = decode_eight(words, b * count, S)
        low = decode_eight(words, (S.HEAD_DIM // 32 + b) * count, S)
        d = (zero, zero, zero, zero)
        for i in gl.static_range(2):
            a = (top[2 * i], low[2 * i], top[2 * i + 1], low[2 * i + 1])
            d = _mma(a, (q_pairs[4 * b + 2 * i], q_pairs[4 * b + 2 * i + 1]), d)
        if S.BITS == 16:
            s = (s[0] + d[0], s[1] + d[1], s[2] + d[2], s[3] + d[3])
        else:
            f_0 = factor_of_byte(factors[b * 32 // S.K_BLOCK // 4], b * 32 // S.K_BLOCK % 4)
            f_1 = factor_of_byte(factors[2 + b * 32 // S.K_BLOCK // 4], b * 32 // S.K_BLOCK % 4)
            s = (s[0] + d[0] * f_0, s[1] + d[1] * f_0, s[2] + d[2] * f_1, s[3] + d[3] * f_1)
    return s


@gluon.jit
def _masked(s, sm_scale, slot, slots, row, rows, mask_0, mask_1, mask_slot, S: gl.constexpr):
    """Return scores times `sm_scale`, and -inf for slots that a query does not see."""
    masked = ()
    for i in gl.static_range(4):
        at, of_row = slot + 8 * (i // 2), row + i % 2
        seen = (at < slots) & (of_row < rows)
        if S.MASKED:
            pointers = mask_1 if i % 2 else mask_0
            seen &= gl.load(pointers + at.to(gl.int64) * mask_slot, mask=seen, other=0) != 0
        masked = masked + (gl.where(seen, s[i] * sm_scale, float("-inf")),)
    return masked


@gluon.jit
def _times_scales(p, factors, first: gl.constexpr, block: gl.constexpr):
    """Return probabilities times the scales of a block of two slots, whose words begin at `first`."""
    return times_factors(p, factors[first + block // 4], factors[first + 2 + block // 4], block % 4)


@gluon.jit
def _add_values(acc, p_0, p_1, values, S: gl.constexpr):
    """Return acc + V^T @ p^T; p_0, p_1: the probabilities of a lane's slots for query g, in pairs."""
    words, factors = values
    count: gl.constexpr = words_of_eight(S)
    new = ()
    for b in gl.static_range(gl.constexpr(S.VALUE_DIM // 32)):
        b_0, b_1 = p_0, p_1
        if S.BITS < 16:
            b_0 = _times_scales(p_0, factors, 0, b * 32 // S.V_BLOCK)
            b_1 = _times_scales(p_1, factors, 4, b * 32 // S.V_BLOCK)
        one, other = decode_eight(words, 2 * b * count, S), decode_eight(words, (2 * b + 1) * count, S)
        for j in gl.static_range(2):
            c = (acc[8 * b + 4 * j], acc[8 * b + 4 * j + 1], acc[8 * b + 4 * j + 2], acc[8 * b + 4 * j + 3])
            new = new + _mma((one[2 * j], one[2 * j + 1], other[2 * j], other[2 * j + 1]), (b_0, b_1), c)
    return new


# --- lanes ---


@gluon.jit
def _transposed(one, other):
    """one, other: of slot g, queries 2t and 2t + 1 -> a pair of bfloat16, of slots 2t and 2t + 1, query g."""
    asm: gl.constexpr = "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, p; }"
    return gl.inline_asm_elementwise(asm, "=r,f,f", (one, other), gl.int32, False, 1)


@gluon.jit
def _over_slots(OPERATION: gl.constexpr, x):
    """Reduce over the lanes with the same t."""
    lines: gl.constexpr = (
        "{ .reg .f32 o; mov.f32 $0, $1;"
        "shfl.sync.bfly.b32 o, $0, 4, 0x1f, 0xffffffff;" + OPERATION + ".f32 $0, $0, o;"
        "shfl.sync.bfly.b32 o, $0, 8, 0x1f, 0xffffffff;" + OPERATION + ".f32 $0, $0, o;"
        "shfl.sync.bfly.b32 o, $0, 16, 0x1f, 0xffffffff;" + OPERATION + ".f32 $0, $0, o; }"
    )
    return gl.inline_asm_elementwise(lines, "=&f,f", (x,), gl.float32, False, 1)


@gluon.jit
def _stacked(parts, COUNT: gl.constexpr):
    """COUNT tensors (warps, 32) -> (warps, 32, COUNT), in the order of `_bits_reversed`."""
    level = parts
    for i in gl.static_range(gl.constexpr((COUNT - 1).bit_length())):
        joined = ()
        for j in gl.static_range(gl.constexpr(COUNT >> i + 1)):
            joined = joined + (gl.join(level[2 * j], level[2 * j + 1]),)
        level = joined
    return level[0].reshape([level[0].shape[0], 32, COUNT])


@gluon.jit
def _bits_reversed(i, COUNT: gl.constexpr):
    reversed_bits = i * 0
    for bit in gl.static_range(gl.constexpr((COUNT - 1).bit_length())):
        reversed_bits = reversed_bits << 1 | i >> bit & 1
    return reversed_bits


@gluon.jit
def _store_partial(partial, m_0, m_1, l_0, l_1, acc, pair, S: gl.constexpr):
    """Join the warps of a program, and store its part."""
    count: gl.constexpr = S.VALUE_DIM // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 1, S.WARPS], [2, 1, 0])
    of_total: gl.constexpr = gl.SliceLayout(0, layout)
    acc_out, ml_out = partial
    w_0, w_1 = _weights(m_0), _weights(m_1)
    weighted = ()
    for i in gl.static_range(gl.constexpr(count // 2)):
        weighted = weighted + (acc[2 * i] * w_0, acc[2 * i + 1] * w_1)
    total = gl.sum(gl.convert_layout(_stacked(weighted, count), layout), 0)  # (32, count)
    lane = gl.arange(0, 32, gl.SliceLayout(1, of_total))[:, None]
    i = _bits_reversed(gl.arange(0, count, gl.SliceLayout(0, of_total)), count)[None, :]
    splits, pairs = gl.num_programs(0), gl.num_programs(1)
    first = (gl.program_id(0) * pairs + pair) * S.BLOCK_M
    at_row = first + lane % 4 * 2 + i % 2
    gl.store(acc_out + at_row * S.VALUE_DIM + (i // 8 * 32 + lane // 4 * 4 + i // 2 % 4), total)
    _store_rows(ml_out + first, gl.max(m_0, 0) * _LN_2, gl.max(m_1, 0) * _LN_2)
    _store_rows(ml_out + splits * pairs * S.BLOCK_M + first, gl.sum(l_0 * w_0, 0), gl.sum(l_1 * w_1, 0))


@gluon.jit
def _join(partial, out, pair, rows, splits, S: gl.constexpr):
    """Store the weighted sum of acc over the weighted sum of l."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [S.WARPS, 1], [1, 0])
    acc_in, ml_in = partial
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    at = gl.arange(0, S.VALUE_DIM, gl.SliceLayout(0, layout))[None, :]
    of_row, pairs = pair * S.BLOCK_M + row, gl.num_programs(1)
    shares, parts, most = (), (), gl.full([8, 1], float("-inf"), gl.float32, layout)
    for i in gl.static_range(gl.constexpr(S.JOINED)):
        first = gl.minimum(i, splits - 1) * pairs * S.BLOCK_M + of_row
        m = gl.where(i < splits, gl.load(ml_in + first), float("-inf"))
        shares = shares + (m, gl.load(ml_in + splits * pairs * S.BLOCK_M + first))
        parts = parts + (gl.load(acc_in + first * S.VALUE_DIM + at),)
        most = gl.maximum(most, m)
    most = gl.where(most == float("-inf"), 0.0, most)
    total, acc = gl.full([8, 1], 0.0, gl.float32, layout), gl.full([8, S.VALUE_DIM], 0.0, gl.float32, layout)
    for i in gl.static_range(gl.constexpr(S.JOINED)):
        weight = gl.exp2((shares[2 * i] - most) * _LOG2_E)
        total += shares[2 * i + 1] * weight
        acc += parts[i] * weight
    acc = acc / gl.where(total == 0, 1.0, total)
    gl.store(out + ((pair * rows + row) * S.VALUE_DIM + at), acc.to(out.dtype.element_ty), mask=row < rows)


@gluon.jit
def _weights(m):
    """Return 2**(m - the largest m of the warps)."""
    most = gl.max(m, 0)[None, :]
    return gl.exp2(m - gl.where(most == float("-inf"), 0.0, most))


@gluon.jit
def _store_rows(pointer, of_0, of_1):
    """of_0, of_1: (32), of queries 2t and 2t + 1, equal for all g."""
    lane = gl.arange(0, 32, of_0.type.layout)
    gl.store(pointer + 2 * lane, of_0, mask=lane < 4)
    gl.store(pointer + 2 * lane + 1, of_1, mask=lane < 4)
