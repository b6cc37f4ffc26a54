"""A cache in the lanes of `flash_decoding_kernel`: loads of codes and scales, or of bfloat16; decoding, and factors."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_queries(q, pair, rows, g, t, S: gl.constexpr):
    """Load the queries as operands: four pairs of each 32 values of row g, in the order of the decoded keys."""
    words = (q + (pair * rows + gl.minimum(g, rows - 1)) * S.HEAD_DIM).to(gl.pointer_type(gl.int32)) + 4 * t
    pairs = ()
    for b in gl.static_range(gl.constexpr(S.HEAD_DIM // 32)):
        w = (gl.load(words + 16 * b), gl.load(words + 16 * b + 1), gl.load(words + 16 * b + 2))
        last = gl.load(words + 16 * b + 3)
        if S.BITS >= 8:
            pairs = pairs + w + (last,)
        else:  # values 0 and 4, 1 and 5, 2 and 6, 3 and 7
            pairs = pairs + (_bytes("0x5410", w[0], w[2]), _bytes("0x7632", w[0], w[2]))
            pairs = pairs + (_bytes("0x5410", w[1], last), _bytes("0x7632", w[1], last))
    return pairs


@gluon.jit
def load_keys(k, first, slot, slots, g, t, S: gl.constexpr):
    """Load the keys of slots g and g + 8: the words that decode to a lane's values of each 32, and the scales."""
    codes, scales = k
    words, factors = (), ()
    for half in gl.static_range(2):
        row = first + gl.minimum(slot + g + 8 * half, slots - 1)
        if S.BITS < 16:
            factors = factors + _load_scales(scales, row, gl.constexpr(S.HEAD_DIM // S.K_BLOCK))
        for b in gl.static_range(gl.constexpr(S.HEAD_DIM // 32)):
            at = codes + (row * (S.HEAD_DIM * S.BITS // 8) + 4 * S.BITS * b + S.BITS * t)
            if S.BITS == 16:
                words = words + gl.inline_asm_elementwise(
                    "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", (at,), four(gl.int32), False, 1
                )
            elif S.BITS == 8:
                both = gl.load(at.to(gl.pointer_type(gl.int64)), eviction_policy="evict_first")
                words = words + (both.to(gl.int32), (both >> 32).to(gl.int32))
            elif S.BITS == 4:
                words = words + (gl.load(at.to(gl.pointer_type(gl.int32)), eviction_policy="evict_first"),)
            else:  # 48 bits
                h = at.to(gl.pointer_type(gl.uint16))
                h_0, h_1, h_2 = gl.load(h).to(gl.int32), gl.load(h + 1).to(gl.int32), gl.load(h + 2).to(gl.int32)
                words = words + _halves(_bytes("0x5410", h_0, h_1), _bytes("0x5541", h_1, h_2))
    return words, factors


@gluon.jit
def load_values(v, first, slot, slots, g, t, S: gl.constexpr):
    """Load the values 4g to 4g + 3 of each 32 of the slots 2t, 2t + 1, 2t + 8, 2t + 9, and the scales."""
    codes, scales = v
    parts, factors = (), ()
    for i in gl.static_range(4):
        row = first + gl.minimum(slot + 2 * t + (i % 2 + i // 2 * 8), slots - 1)
        if S.BITS < 16:
            factors = factors + _load_scales(scales, row, gl.constexpr(S.VALUE_DIM // S.V_BLOCK))
        for b in gl.static_range(gl.constexpr(S.VALUE_DIM // 32)):
            at = codes + (row * (S.VALUE_DIM * S.BITS // 8) + 4 * S.BITS * b)
            if S.BITS == 16:
                part = gl.load((at + 8 * g).to(gl.pointer_type(gl.int64)))
            elif S.BITS == 8:
                part = gl.load((at + 4 * g).to(gl.pointer_type(gl.int32)), eviction_policy="evict_first")
            elif S.BITS == 4:
                part = gl.load((at + 2 * g).to(gl.pointer_type(gl.uint16))).to(gl.int32)
            else:  # 24 bits, that may begin at an odd byte
                h = (at + 3 * g // 2 * 2).to(gl.pointer_type(gl.uint16))
                part = _bytes("0x5410", gl.load(h).to(gl.int32), gl.load(h + 1).to(gl.int32)) >> g % 2 * 8
            parts = parts + (part,)
    words = ()  # the codes of two slots, interleaved
    for b in gl.static_range(gl.constexpr(S.VALUE_DIM // 32)):
        for i in gl.static_range(2):
            one = parts[(2 * i) * (S.VALUE_DIM // 32) + b]
            other = parts[(2 * i + 1) * (S.VALUE_DIM // 32) + b]
            if S.BITS == 16:
                low, low_2 = one.to(gl.int32), other.to(gl.int32)
                high, high_2 = (one >> 32).to(gl.int32), (other >> 32).to(gl.int32)
                words = words + (_bytes("0x5410", low, low_2), _bytes("0x7632", low, low_2))
                words = words + (_bytes("0x5410", high, high_2), _bytes("0x7632", high, high_2))
            elif S.BITS == 8:
                words = words + (_bytes("0x5140", one, other), _bytes("0x7362", one, other))
            elif S.BITS == 4:
                words = words + (_bytes("0x5410", one, other),)
            else:
                words = words + _halves(one, other)
    return words, factors


@gluon.jit
def _halves(one, other):
    """24 bits of each -> bits 0 to 11 of both in the halves of a word, then bits 12 to 23."""
    return _bytes("0x5410", one, other), _bytes("0x5410", one >> 12, other >> 12)


@gluon.jit
def _load_scales(scales, row, COUNT: gl.constexpr):
    """Load the scales of a row as two words of four bytes."""
    at = scales + row * COUNT
    if COUNT == 8:
        both = gl.load(at.to(gl.pointer_type(gl.int64)))
        words = both.to(gl.int32), (both >> 32).to(gl.int32)
    elif COUNT == 4:
        word = gl.load(at.to(gl.pointer_type(gl.int32)))
        words = word, word
    elif COUNT == 2:
        word = gl.load(at.to(gl.pointer_type(gl.uint16))).to(gl.int32)
        words = word, word
    else:
        word = gl.load(at).to(gl.int32)
        words = word, word
    return words


# --- decoding ---


@gluon.constexpr_function
def words_of_eight(S):
    return {4: 1, 6: 2, 8: 2, 16: 4}[S.BITS]


@gluon.constexpr_function
def _decode_constraints(S):
    return ",".join(["=&r"] * 4 + ["r"] * (1 if S.BITS == 4 else 2))


@gluon.constexpr_function
def four(dtype):
    return (dtype,) * 4


@gluon.jit
def decode_eight(words, first, S: gl.constexpr):
    """Decode eight codes, from word `first` on, to four pairs of bfloat16."""
    if S.BITS == 16:
        return words[first], words[first + 1], words[first + 2], words[first + 3]
    operands = (words[first],)
    if S.BITS != 4:
        operands = operands + (words[first + 1],)
    return gl.inline_asm_elementwise(S.ptx, _decode_constraints(S), operands, four(gl.int32), True, 1)


@gluon.jit
def _bytes(SELECTOR: gl.constexpr, one, other):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + SELECTOR + ";", "=r,r,r", (one, other), gl.int32, True, 1
    )


@gluon.jit
def factor_of_byte(word, byte: gl.constexpr):
    """Return the scale in a byte of a word, fp32."""
    scale = word >> 8 * byte & 0xFF
    bits = gl.where(scale == 0xFF, 0x7FC00000, gl.maximum(scale << 23, 0x400000))
    return bits.to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _two_bytes(byte):
    return f"0x{4 + byte}{4 + byte}{byte}{byte}"


@gluon.jit
def times_factors(p, one, other, byte: gl.constexpr):
    """Return a pair of bfloat16 times the scales in a byte of two words."""
    scales = _bytes(_two_bytes(byte), one, other) & 0x00FF00FF
    nan = (scales + 0x00010001 & 0x01000100) >> 2  # makes Inf NaN
    # sm_80 has no product of pairs: the fused multiply-add adds -0, which changes no product
    asm: gl.constexpr = (
        "{ .reg .b32 f, z; max.bf16x2 f, $2, $3; or.b32 f, f, $4; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, f, z; }"
    )
    least = scales * 0 + 0x00400040
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", (p, scales << 7, least, nan), gl.int32, True, 1)
