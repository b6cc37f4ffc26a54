"""Scales and codes of bfloat16 values, two per instruction, in Triton. The results equal the results of `blocks`, which
computes in fp32; this module supports float elements and rounding to nearest even.

A pair is two bfloat16 in one int32, the first in the low half. bfloat16 has fp32's exponents and eight significant
bits: scaling by a power of two is exact, and a sum rounds to the nearest element of up to five mantissa bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_EXPONENTS = tl.constexpr(0x7F807F80)
_MINUS_ZEROS = tl.constexpr(0x80008000 - (1 << 32))
_TWICE = tl.constexpr(0x00010001)
_TWO_TO_MINUS_127 = tl.constexpr(0x40)


@triton.jit
def pair_of(low, high):
    """low, high: bfloat16 -> pairs."""
    return tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], tl.int32, is_pure=True, pack=1)


@triton.jit
def round_to_pair(low, high):
    """low, high: fp32 -> pairs."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def fused_multiply_add(a, b, c):
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def least_magnitude(a, b):
    """min(|a|, b)"""
    asm: tl.constexpr = "{ .reg .b32 a; abs.bf16x2 a, $1; min.bf16x2 $0, a, $2; }"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def largest(a, b):
    """max(a, b)"""
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def largest_magnitude(a, b):
    """max(|a|, |b|), or NaN if one is."""
    asm: tl.constexpr = "{ .reg .b32 a, b; abs.bf16x2 a, $1; abs.bf16x2 b, $2; max.NaN.bf16x2 $0, a, b; }"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def even_bytes(a, b):
    """Bytes 0 and 2 of a, then bytes 0 and 2 of b."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def odd_bytes(a, b):
    """Bytes 1 and 3 of a, then bytes 1 and 3 of b."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def amax_of_pairs(pairs, AXIS: tl.constexpr):
    """pairs, with blocks along AXIS -> the fp32 bits of each block's largest magnitude, or of a NaN; int32, without
    AXIS."""
    pair = tl.reduce(pairs, AXIS, largest_magnitude)
    return tl.maximum(pair << 16, pair & 0x7FFF0000)


@triton.jit
def code_words(first, second, scale, C: tl.constexpr):
    """first, second: pairs with values 0 and 1, and 2 and 3, of every four; scale: (lines) E8M0 -> words of four codes,
    the first one lowest."""
    biased = 254 - scale
    factor = tl.expand_dims(tl.where(biased == 0, _TWO_TO_MINUS_127, biased << 7) * _TWICE, 1)
    v0, c0 = codes_of_pair(first, factor, C)
    v1, c1 = codes_of_pair(second, factor, C)
    # each byte holds a magnitude code, and above it the sign, from the top bit of the value
    magnitude: tl.constexpr = 0x01010101 * ((1 << (C.bits - 1)) - 1)
    words = (even_bytes(c0, c1) & magnitude) | ((odd_bytes(v0, v1) >> (8 - C.bits)) & ~magnitude)
    if C.word_bytes == 2:
        words = (words & 0x000F000F) | ((words >> 4) & 0x00F000F0)
        words = (words & 0x000000FF) | ((words >> 8) & 0x0000FF00)
    elif C.word_bytes == 3:
        words = (words & 0x003F003F) | ((words >> 2) & 0x0FC00FC0)
        words = (words & 0x00000FFF) | ((words >> 4) & 0x00FFF000)
    else:
        words &= C.byte_mask
    return words


@triton.jit
def codes_of_pair(pair, factor, C: tl.constexpr):
    """Return a pair of values in units of the scale, and an int32 whose halves end in the codes of their magnitudes."""
    v = fused_multiply_add(pair, factor, _MINUS_ZEROS)  # keeps the sign of zero
    a = least_magnitude(v, C.max_pair)
    binade = largest(a & _EXPONENTS, C.min_normal_pair)
    # adding 2**(7 - mantissa bits) binades leaves the number of quanta, rounded to even, in the last bits
    quanta = fused_multiply_add(binade, C.rounding_pair, a)
    # each binade has 2**mantissa_bits codes; the exponent field numbers the binades
    codes = quanta + (binade >> (7 - C.mantissa_bits)) + C.first_code_pair
    return v, codes


@triton.jit
def magnitudes_of_pair(pair, scale, C: tl.constexpr):
    """Return the magnitudes of quantized and dequantized values, integers included, valid where `pairs_round` holds for
    the scale;
    scale: int32 that broadcasts to pairs."""
    most = (scale - 127 << 7) * _TWICE + C.max_pair
    least = (scale - 127 << 7) * _TWICE + C.min_normal_pair
    a = least_magnitude(pair, most)
    binade = largest(a & _EXPONENTS, least)
    # adding 2**(7 - mantissa bits) binades rounds to a whole number of quanta, ties to even
    sums = fused_multiply_add(binade, C.rounding_pair, a)
    return fused_multiply_add(binade, C.rounding_pair ^ _MINUS_ZEROS, sums)


@triton.jit
def pairs_round(scale, C: tl.constexpr):
    """Return where the smallest binade and the sums of `magnitudes_of_pair` are normal numbers."""
    return (scale + C.emin >= 1) & (scale + C.emax - C.mantissa_bits <= 246)
