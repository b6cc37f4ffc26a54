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
from pt2mx.kernels.gpu.float_scales import candidate_of, finite_scale, quotient_of, ratio_of

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
        scale = (float_code_of(parts, quotient_of(amax, t, C), t, finite, C), t)
    else:
        scale, finite = scale_of_amax(amax.to(tl.int32, bitcast=True) & _MAGNITUDE, C)
        if C.searches:
            scale = least_squares(parts, scale, finite, C)
    return scale, finite


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least_squares(parts, scale, finite, C: tl.constexpr):
    """Add each offset to `scale`, and return the scale with the smallest sum of squared errors; the first of equal
    ones."""
    best = clamp_scale(scale + C.exponent_offsets[0])
    least = squared_error(parts, best, scale, finite, C)
    for i in tl.static_range(tl.constexpr(1), tl.constexpr(C.candidates)):
        candidate = clamp_scale(scale + C.exponent_offsets[i])
        total = squared_error(parts, candidate, scale, finite, C)
        best = tl.where(total < least, candidate, best)
        least = tl.minimum(total, least)
    return best


@triton.jit
def squared_error(parts, candidate, scale, finite, C: tl.constexpr):
    """Return the sum of a block's squared errors with the scale `candidate`. Errors are whole units of 2**(emax + 1 -
    error_bits) times the scale `scale`; (lines) int64."""
    unit = tl.expand_dims(power_of_two(candidate - scale + (127 + C.error_bits - C.emax - 1)), 1)
    total = tl.zeros_like(scale).to(tl.int64)
    for i in tl.static_range(tl.constexpr(len(parts))):
        v = in_units(parts[i], candidate, finite, C)
        p = round_magnitude(v, None, tl.constexpr(C.nearest), C)
        total += sum_of_squares(tl.abs(tl.abs(v) - p) * unit, C)
    return total


@triton.jit
def sum_of_squares(error, C: tl.constexpr):
    """error: fp32 tile -> the sums of the squares of whole numbers, (lines) int64."""
    error = tl.minimum(error, 2.0**C.error_bits)
    error = tl.where(error < _TWO_TO_23, (error + _TWO_TO_23) - _TWO_TO_23, error).to(tl.int64)  # to a whole number
    return tl.sum(error * error, 1)


@triton.jit
def float_code_of(parts, quotient, t, finite, C: tl.constexpr):
    """quotient: (lines) fp32, of `quotient_of` -> the code of the scale, of a search the one with the smallest sum of
    squared errors, the first of equal ones; (lines) int32."""
    best = candidate_of(quotient, 0, C)
    if C.searches:
        first, least = best, float_squared_error(parts, best, best, t, finite, C)
        for i in tl.static_range(tl.constexpr(1), tl.constexpr(C.scale.candidates)):
            candidate = candidate_of(quotient, i, C)
            total = float_squared_error(parts, candidate, first, t, finite, C)
            best = tl.where(total < least, candidate, best)
            least = tl.minimum(total, least)
    return best


@triton.jit
def float_squared_error(parts, candidate, first, t, finite, C: tl.constexpr):
    """`squared_error` of a candidate's code, in units of the scale `first`."""
    ratio = tl.expand_dims(ratio_of(candidate, first, C), 1)
    total = tl.zeros_like(candidate).to(tl.int64)
    for i in tl.static_range(tl.constexpr(len(parts))):
        v = in_units(parts[i], (candidate, t), finite, C)
        p = round_magnitude(v, None, tl.constexpr(C.nearest), C)
        total += sum_of_squares(tl.abs(tl.abs(v) - p) * ratio * 2.0 ** (C.error_bits - C.emax - 1), C)
    return total


@triton.jit
def fake_quantized(blocks, t, seed, offsets, C: tl.constexpr):
    """blocks: fp32 tile, t: as of `scale_of` -> the same quantized and dequantized; `seed`, `offsets`: for stochastic
    rounding."""
    scale, finite = scale_of((blocks,), t, C)
    v, p = rounded(blocks, scale, finite, seed, offsets, C)
    return counted(with_sign(p, v, C), C) * factor_of(scale, finite, C)
