"""The scales of blocks on tiles (`pt2mx.kernels.gpu.tiles`) and the search for the one that loses least, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from pt2mx.kernels.gpu.blocks import (
    clamp_scale,
    counted,
    factor_of,
    in_units,
    power_of_two,
    round_magnitude,
    rounded,
    scale_of_amax,
    with_sign,
)
from pt2mx.kernels.gpu.float_scales import code_of_candidate, finite_scale, quotient_of, ratio_of

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_TWO_TO_23 = tl.constexpr(2.0**23)


@triton.jit
def scale_of(parts, t, C: tl.constexpr):
    """parts: fp32 tiles of the same lines, t: the tensor scale, for formats with a significand -> the scale of each
    finite block, and whether each block is finite; (lines). A scale is int32, E8M0, or as `float_scales` has it."""
    amax = tl.reduce(tl.abs(parts[0]), 1, maximum)
    for i in tl.static_range(tl.constexpr(1), tl.constexpr(len(parts))):
        amax = maximum(amax, tl.reduce(tl.abs(parts[i]), 1, maximum))
    if C.has_significand:
        finite = finite_scale(amax, t)
        quotient = quotient_of(amax, t, C)
        if C.searches:
            code = least_squares(parts, quotient, t, finite, C)
        else:
            code = candidate_of(quotient, 0, C)
        scale = (code, t)
    else:
        scale, finite = scale_of_amax(amax.to(tl.int32, bitcast=True) & _MAGNITUDE, C)
        if C.searches:
            scale = least_squares(parts, scale, t, finite, C)
    return scale, finite


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least_squares(parts, start, t, finite, C: tl.constexpr):
    """start: (lines), the E8M0 scales before the search, or the quotients of `quotient_of` -> the candidate with the
    smallest sum of squared errors, the first of equal ones; (lines) int32."""
    first = candidate_of(start, 0, C)
    best = first
    least = squared_error(parts, first, first, t, finite, C)
    for i in tl.static_range(tl.constexpr(1), tl.constexpr(C.candidates)):
        candidate = candidate_of(start, i, C)
        total = squared_error(parts, candidate, first, t, finite, C)
        best = tl.where(total < least, candidate, best)
        least = tl.minimum(total, least)
    return best


@triton.jit
def candidate_of(start, INDEX: tl.constexpr, C: tl.constexpr):
    """Return candidate number INDEX of a search: an E8M0 scale, or the code of a scale with a significand."""
    if C.has_significand:
        candidate = code_of_candidate(start, INDEX, C)
    else:
        candidate = clamp_scale(start + C.exponent_offsets[INDEX])
    return candidate


@triton.jit
def squared_error(parts, candidate, first, t, finite, C: tl.constexpr):
    """Return the sum of a block's squared errors with the scale `candidate`. Errors are whole units of 2**(emax + 1 -
    error_bits) times the scale `first`; (lines) int64."""
    if C.has_significand:
        scale = (candidate, t)
        ratio = ratio_of(candidate, first, C)
    else:
        scale = candidate
        ratio = power_of_two(candidate - first + 127)
    ratio = tl.expand_dims(ratio, 1)
    total = tl.zeros_like(candidate).to(tl.int64)
    for i in tl.static_range(tl.constexpr(len(parts))):
        v = in_units(parts[i], scale, finite, C)
        p = round_magnitude(v, None, tl.constexpr(C.nearest), C)
        total += sum_of_squares(tl.abs(tl.abs(v) - p) * ratio * 2.0 ** (C.error_bits - C.emax - 1), C)
    return total


@triton.jit
def sum_of_squares(error, C: tl.constexpr):
    """error: fp32 tile -> the sums of the squares of whole numbers, (lines) int64."""
    error = tl.minimum(error, 2.0**C.error_bits)
    error = tl.where(error < _TWO_TO_23, (error + _TWO_TO_23) - _TWO_TO_23, error).to(tl.int64)  # to a whole number
    return tl.sum(error * error, 1)


@triton.jit
def fake_quantized(blocks, t, seed, offsets, C: tl.constexpr):
    """blocks: fp32 tile, t: as of `scale_of` -> the same quantized and dequantized; `seed`, `offsets`: for stochastic
    rounding."""
    scale, finite = scale_of((blocks,), t, C)
    v, p = rounded(blocks, scale, finite, seed, offsets, C)
    return counted(with_sign(p, v, C), C) * factor_of(scale, finite, C)
