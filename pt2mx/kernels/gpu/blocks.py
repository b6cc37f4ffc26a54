"""The functions of `pt2mx.kernels.reference` on tiles of blocks (`pt2mx.kernels.gpu.tiles`), in Triton.

Powers of two are built from their bits. Every product of a value and a power of two is exact, or too small to matter,
so a fused multiply-add returns the same as two operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pt2mx.kernels.gpu.float_scales import divided, multiplier

_SIGN = tl.constexpr(-0x80000000)
_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MANTISSA = tl.constexpr(0x7FFFFF)
_TWO_TO_MINUS_127 = tl.constexpr(0x400000)
NAN_SCALE = tl.constexpr(0xFF)
MAX_SCALE = tl.constexpr(0xFE)
_TWO_TO_31 = tl.constexpr(2.0**31)
_TWO_TO_MINUS_126 = tl.constexpr(2.0**-126)

# --- scales (steps 1 to 3 of the design page; their search is in `scales`); all per line ---


@triton.jit
def scale_of_amax(amax, C: tl.constexpr):
    """amax: fp32 bits of the largest magnitudes, (lines) -> the E8M0 scale before a search, and whether the block is
    finite.

    The shift must come last. With a subtraction as the last step, ptxas (12.8, 13.0) paired the subtractions of scales
    that a thread stores as bytes, and lost one pair of 32.
    """
    mantissa = amax & _MANTISSA
    round_up = tl.where(amax == mantissa, mantissa > ((C.threshold + _MANTISSA + 1) >> 1), mantissa > C.threshold)
    raised = amax + (round_up.to(tl.int32) << 23) - (C.emax << 23)
    return tl.minimum(tl.maximum(raised, 0) >> 23, MAX_SCALE), amax < _INF


@triton.jit
def clamp_scale(scale):
    return tl.minimum(tl.maximum(scale, 0), MAX_SCALE)


@triton.jit
def power_of_two(biased):
    """2**(biased - 127) in fp32; biased: int32 in [0, 254]."""
    return tl.where(biased == 0, _TWO_TO_MINUS_127, biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def factor(biased, finite, C: tl.constexpr):
    """2**(biased - 127), or NaN where the block is not finite, shaped to broadcast over a tile."""
    bits = tl.where(biased == 0, _TWO_TO_MINUS_127, biased << 23)
    return tl.expand_dims(tl.where(finite, bits, _NAN).to(tl.float32, bitcast=True), 1)


@triton.jit
def over_scale(blocks, scale, finite, C: tl.constexpr):
    """Return `blocks` in units of their scales; they may underflow to zero."""
    if C.has_significand:
        v = divided(blocks, scale, finite, C)
    else:
        v = blocks * factor(MAX_SCALE - scale, finite, C)
    return v


@triton.jit
def factor_of(scale, finite, C: tl.constexpr):
    """Return what multiplies the values of a block (`counted`), NaN where it is not finite, shaped to broadcast over a
    tile."""
    if C.has_significand:
        factors = tl.expand_dims(tl.where(finite, multiplier(scale, C), float("nan")), 1)
    else:
        factors = factor(scale, finite, C)
    return factors


@triton.jit
def counted(values, C: tl.constexpr):
    """Return values of the element as its scales count them: scales with a significand count whole numbers."""
    if C.has_significand and C.is_int:
        values *= 2.0**C.mantissa_bits
    return values


@triton.jit
def stored_scale(scale, finite, C: tl.constexpr):
    """Return the codes of scales as they are stored, int32."""
    if C.has_significand:
        code = tl.where(finite, scale[0], C.scale.nan)
    else:
        code = tl.where(finite, scale, NAN_SCALE)
    return code


# --- values (step 4) ---


@triton.jit
def in_units(blocks, scale, finite, C: tl.constexpr):
    """Return `blocks` in units of their scales. They may underflow to zero, except where that would change a directed
    rounding."""
    v = over_scale(blocks, scale, finite, C)
    if C.directed:
        bits = blocks.to(tl.int32, bitcast=True)
        smallest = (bits & _SIGN | 1 << 23).to(tl.float32, bitcast=True)  # +-2**-126
        v = tl.where((tl.abs(v) < _TWO_TO_MINUS_126) & (blocks != 0), smallest, v)
    return v


@triton.jit
def round_magnitude(v, random, ROUNDING: tl.constexpr, C: tl.constexpr):
    """v: fp32 in units of the scale -> the magnitude of a neighbouring value of the element, saturated.

    `random`: int32 in [0, 2**31), for stochastic rounding. Beyond the last binade the quantum is larger than the
    reference's, but all such values saturate anyway.
    """
    negative = v.to(tl.int32, bitcast=True) < 0
    a = tl.abs(v)
    if C.emin == C.emax:
        binade = tl.full([], 2.0**C.emin, tl.float32)
    else:
        binade = (v.to(tl.int32, bitcast=True) & _INF).to(tl.float32, bitcast=True)  # 2**floor(log2 |v|)
        binade = tl.maximum(binade, 2.0**C.emin)
    # adding 2**23 quanta rounds to a whole number of them, ties to even
    many = binade * 2.0 ** (23 - C.mantissa_bits)
    p = (a + many) - many
    if ROUNDING != "even":
        quantum = binade * 2.0**-C.mantissa_bits
        floor = tl.where(p > a, p - quantum, p)
        ceil = tl.where(p < a, p + quantum, p)
        if ROUNDING == "half_away":
            p = tl.where(a - floor >= 0.5 * quantum, floor + quantum, floor)
        elif ROUNDING == "half_toward_zero":
            p = tl.where(a - floor > 0.5 * quantum, floor + quantum, floor)
        elif ROUNDING == "half_up":
            half = 0.5 * quantum
            p = tl.where(tl.where(negative, a - floor > half, a - floor >= half), floor + quantum, floor)
        elif ROUNDING == "toward_zero":
            p = floor
        elif ROUNDING == "up":
            p = tl.where(negative, floor, ceil)
        elif ROUNDING == "down":
            p = tl.where(negative, ceil, floor)
        else:
            tl.static_assert(ROUNDING == "stochastic")
            reciprocal = ((254 << 23) - quantum.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
            fraction = (a - floor) * reciprocal * _TWO_TO_31
            p = tl.where(random < fraction.to(tl.int32), floor + quantum, floor)
    if C.lowest == -C.max_normal:
        p = tl.minimum(p, C.max_normal)
    else:
        p = tl.minimum(p, tl.where(negative, -C.lowest, C.max_normal))
    return p


@triton.jit
def with_sign(p, v, C: tl.constexpr):
    """Return the value of the element with magnitude p and the sign of v."""
    signed = (p.to(tl.int32, bitcast=True) | v.to(tl.int32, bitcast=True) & _SIGN).to(tl.float32, bitcast=True)
    if C.is_int:
        signed = tl.where(p == 0, 0.0, signed)  # two's complement has no negative zero
    return signed


@triton.jit
def encode(p, v, C: tl.constexpr):
    """Return the code of the value with magnitude p and the sign of v, int32 in [0, 2**bits)."""
    sign = v.to(tl.int32, bitcast=True)
    if C.is_int:  # after adding 1.5 * 2**(23 - mantissa bits), the lowest bits are the integer in two's complement
        signed = (p.to(tl.int32, bitcast=True) | sign & _SIGN).to(tl.float32, bitcast=True)
        return (signed + 1.5 * 2.0 ** (23 - C.mantissa_bits)).to(tl.int32, bitcast=True) & ((1 << C.bits) - 1)
    # a value times 2**(bias - 127) has the element's exponent field, and is subnormal if the element's value is
    rebias = power_of_two(tl.full([], C.bias, tl.int32))
    magnitude = (p * rebias).to(tl.int32, bitcast=True) >> (23 - C.mantissa_bits)
    return magnitude | (sign >> (32 - C.bits)) & (1 << (C.bits - 1))


@triton.jit
def decode(codes, C: tl.constexpr):
    """codes: int32 in [0, 2**bits) -> their values in fp32."""
    if C.is_int:
        unit = power_of_two(tl.full([], 127 + C.emin - C.mantissa_bits, tl.int32))
        value = (codes << (32 - C.bits) >> (32 - C.bits)).to(tl.float32) * unit
    else:
        top = codes << (32 - C.bits)
        bits = (top >> (9 - C.bits + C.mantissa_bits)) & (_SIGN | ((1 << (C.bits - 1)) - 1) << (23 - C.mantissa_bits))
        # times 2**(127 - bias), as in `encode`
        value = bits.to(tl.float32, bitcast=True) * power_of_two(tl.full([], 254 - C.bias, tl.int32))
        if C.special:  # codes beyond the largest number, as in fp32: Inf if the mantissa is 0, else NaN
            bits = value.to(tl.int32, bitcast=True)
            bits = tl.where(tl.abs(value) > C.max_normal, bits | _INF, bits)
            value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def random_at(seed, position):
    """Return the numbers of `pt2mx.kernels.reference.random_bits` for a position in the tensor, int32 in [0, 2**31)."""
    counter = position.to(tl.int64) >> 2
    zero = tl.zeros_like(counter).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero)
    lane = position & 3
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return (word >> 1).to(tl.int32)


@triton.jit
def rounded(part, scale, finite, seed, offsets, C: tl.constexpr):
    """part: fp32 tile -> the same in units of the scale, and the rounded magnitudes."""
    random = None
    if C.random:
        random = random_at(seed, offsets)
    v = in_units(part, scale, finite, C)
    return v, round_magnitude(v, random, tl.constexpr(C.rounding), C)


# --- rotation ---


@triton.jit
def rotated(values, SIZE: tl.constexpr):
    """Values of any shape in fp32, whole blocks of SIZE -> the same rotated.

    Each stage adds and subtracts neighbours, and stores the differences after the sums: after the last stage every
    value is back at its index.
    """
    BLOCKS: tl.constexpr = values.numel // SIZE
    index = tl.arange(0, SIZE)
    odd = index & (index >> 1) & 0x5555
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    y = tl.reshape(values, [BLOCKS, SIZE])
    y *= tl.where((odd & 1)[None, :] == 1, -1.0, 1.0)  # Triton's minus is 0 - y, which is no -0
    HALF: tl.constexpr = SIZE // 2
    for i in tl.static_range(20):
        if SIZE >> i > 1:
            first, second = tl.split(tl.reshape(y, [BLOCKS, HALF, 2]))
            y = tl.join(first + second, first - second)
            y = tl.reshape(tl.permute(y, (0, 2, 1)), [BLOCKS, SIZE])
    return tl.reshape(y * SIZE**-0.5, values.shape)
