"""Scales that are powers of two: E8M0, and other widths of the exponent. Part of the definition
(`pt2mx.kernels.reference`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.kernels import elements
from pt2mx.kernels.elements import BIAS, Prims, pow2, times_pow2
from pt2mx.kernels.scale_search import least_squares, scale_by_function
from pt2mx.modes import SCALE_MODES
from pt2mx.spec import MXSpec

_MANTISSA = 0x7FFFFF
_INF = 0x7F800000


@dataclass(frozen=True)
class ExponentScale:
    """Scales `2**exponent`, int32 in [-252, 252], as `BlockScale`."""

    exponent: Tensor
    finite: Tensor
    prims: Prims

    def divide(self, values: Tensor) -> Tensor:
        return times_pow2(values, -self.exponent, self.finite, self.prims.realize)

    def multiply(self, values: Tensor) -> Tensor:
        return times_pow2(values, self.exponent, self.finite, self.prims.realize)

    def stored(self) -> Tensor:
        return self.prims.scale_bytes(self.exponent, self.finite)

    def value(self) -> Tensor:
        return self.multiply(torch.ones_like(self.exponent, dtype=torch.float32))


def scale_of(blocks: Tensor, spec: MXSpec, tensor_scale: Tensor | None, prims: Prims) -> ExponentScale:
    """Return the scales of blocks; these have no tensor scale."""
    function = SCALE_MODES[spec.scale_mode].function
    if function is not None:
        scale, finite = scale_by_function(function, blocks, spec)
        return ExponentScale(_clamp((scale.view(torch.int32) >> 23) - BIAS, spec), finite, prims)
    return ExponentScale(*shared_exponent(blocks, spec, prims), prims)


def times_stored(blocks: Tensor, codes: Tensor, spec: MXSpec, tensor_scale: Tensor | None, prims: Prims) -> Tensor:
    """Return values in units of their scale, times the scales of these codes."""
    return prims.times_scales(blocks, codes)


def shared_exponent(blocks: Tensor, spec: MXSpec, prims: Prims = elements) -> tuple[Tensor, Tensor]:
    """blocks: (..., blocks, block, ...) fp32 -> exponent (..., blocks, 1, ...) int32 in the range of the scale, and
    whether the block is finite. Design: numerics, steps 1 to 3.

    The mantissa field of a subnormal fp32 amax counts units of 2**-149, without a hidden bit. Only for a format with
    emax 0 does this matter, where 2**-127 and 2**-126 are different scales: there `(threshold + 2**23) / 2` is the
    threshold in these units.
    """
    # bits of non-negative floats compare like the floats; a compiled amax may return a NaN with its sign bit set
    amax = blocks.abs().amax(spec.axis + 1, keepdim=True).view(torch.int32) & 0x7FFFFFFF
    lowered: int | Tensor = spec.element.emax
    if spec.scale_exp_bits > 8:  # a wider scale also distinguishes the exponents of fp32 subnormals
        subnormal = amax <= _MANTISSA
        amax = torch.where(subnormal, (amax.view(torch.float32) * 2.0**24).view(torch.int32), amax)
        lowered = lowered + 24 * subnormal.to(torch.int32)
    mode = SCALE_MODES[spec.scale_mode]
    threshold = mode.threshold(spec.element)
    mantissa = amax & _MANTISSA
    round_up = torch.where(amax == mantissa, mantissa > (threshold + _MANTISSA + 1) >> 1, mantissa > threshold)
    exponent = (amax >> 23) - BIAS + round_up.to(torch.int32) - lowered
    exponent, finite = _clamp(exponent, spec), amax < _INF
    if mode.searches:
        candidates = [_clamp(exponent + change, spec) for change in mode.exponent_offsets]
        first = exponent
        exponent = least_squares(
            blocks,
            candidates,
            lambda candidate: ExponentScale(candidate, finite, prims),
            lambda candidate: pow2(candidate - first),
            spec,
            prims,
        )
    return exponent, finite


def _clamp(exponent: Tensor, spec: MXSpec) -> Tensor:
    """Clamp `exponent` to the range of the scale. No block needs one below -213, and `times_pow2` supports down to
    -252."""
    limit = 2 ** (spec.scale_exp_bits - 1) - 1
    return exponent.clamp(max(-limit, -252), limit)
