"""The scales of blocks in ONNX functions, for scales that are powers of two and for scales with a significand."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pt2mx.kernels.float_scales import steps_of, value_of
from pt2mx.modes import FLOAT_SCALE_MODES, SCALE_MODES
from pt2mx.pt2e.onnx.function import Function, Input, onnx
from pt2mx.pt2e.onnx.rounding import round_to_element, ulp_of
from pt2mx.scale_formats import TENSOR_SCALE_RANGE, ScaleFormat
from pt2mx.spec import MXSpec

_TYPE = onnx.TensorProto
#: the threshold of a scale mode that never rounds up
_NEVER = 2**23 - 1
_CASTS = {torch.float16: _TYPE.FLOAT16, torch.bfloat16: _TYPE.BFLOAT16}


def unit_of(f: Function, amax: str, spec: MXSpec) -> str:
    """amax: (..., blocks, 1, ...) -> the scale of each block; for integer elements, the value of a code's unit."""
    element = spec.element
    step = 2.0**-element.mantissa_bits if element.is_int else 1.0
    threshold = SCALE_MODES[spec.scale_mode].threshold(element)
    factors = _rounding_up(threshold)
    half = 0.5 if element.emax else 1.0  # so that no product overflows
    if threshold < 0:  # every amax is doubled, and powers of two have the scale of their binade
        amax = f.op("Min", amax, 2.0**126 / half)
    elif not element.emax:  # the largest scale is 2**127; halves of small numbers would lose bits
        amax = f.op("Min", amax, 2.0**127 * (1 if threshold == _NEVER else 1 - 2.0**-24))
    for factor in (factors[0] * half, *factors[1:]):
        amax = f.op("Mul", amax, factor)
    return f.op("Max", f.op("Mul", ulp_of(f, amax), 2.0 ** (23 - element.emax) / half * step), 2.0**-127 * step)


@functools.cache
def _rounding_up(threshold: int) -> list[float]:
    """Return one or two factors whose product with 1 + m * 2**-23, rounded, is above 2 where m is above the threshold.

    `ulp_of` takes the power below the product: above 2 it is the next power. Rounding is monotone, so that the two
    numbers next to the threshold decide.
    """
    above = np.float32(1 + (threshold + 1) * 2.0**-23)
    last = np.nextafter(above, np.float32(0))
    for first in (np.float32(1 + n / 64) for n in range(64)):
        near = np.float32(2) / (last * first)
        for factor in (near, *(np.nextafter(near, np.float32(bound)) for bound in (3, 0))):
            if last * first * factor <= 2 < above * first * factor:
                return [float(factor)] if first == 1 else [float(first), float(factor)]
    raise NotImplementedError(f"no factors for the threshold {threshold}")


@dataclass(frozen=True)
class _Symbol:
    """A float32 value of a function, with the operations of `TENSOR_SCALES`."""

    f: Function
    name: str
    device = None  # of constants that are made for it

    def __mul__(self, other: object) -> _Symbol:
        return _Symbol(self.f, self.f.op("Mul", self.name, _input(other)))

    __rmul__ = __mul__

    def divided_by(self, other: object) -> _Symbol:
        return _Symbol(self.f, self.f.op("Div", self.name, _input(other)))


def _input(value: object) -> Input:
    return value.name if isinstance(value, _Symbol) else float(value)  # type: ignore[arg-type]


def _divide(a: Any, b: Any) -> _Symbol:
    if isinstance(a, _Symbol):
        return a.divided_by(b)
    # the only constant that the steps divide is 1, written as b / b: onnxruntime makes y / b of 1 / b * y
    return _Symbol(b.f, b.f.op("Div", b.f.op("Div", b.name, b.name), b.name))


def _step(f: Function, spec: MXSpec, step: str, *operands: Input) -> str:
    """Return the result of a step of `TensorScale` for float32 values of the function, and constants."""
    symbols = [_Symbol(f, value) if isinstance(value, str) else value for value in operands]
    return getattr(steps_of(spec), step)(*symbols, _divide).name


def tensor_scale(f: Function, x: str, spec: MXSpec, static: str = "") -> str:
    """Return the tensor scale of x, float32 (1,): of its finite values, or the given one, NaN if that is out of
    range."""
    least, most = TENSOR_SCALE_RANGE
    if static:
        t = f.op("Reshape", static, [1])
        in_range = f.op("And", f.op("GreaterOrEqual", t, least), f.op("LessOrEqual", t, most))
        return f.op("Where", in_range, t, float("nan"))
    magnitude = f.op("Abs", x)
    finite = f.op("Where", f.op("Less", magnitude, float("inf")), magnitude, 0.0)
    amax = f.op("Reshape", f.op("ReduceMax", finite, keepdims=0), [1])
    room = FLOAT_SCALE_MODES[spec.scale_mode].tensor_room(spec.scale_format)
    t = _step(f, spec, "of_amax", amax, spec.element.max_normal / spec.element.unit * room)
    return f.op("Where", f.op("Greater", amax, 0.0), f.op("Clip", t, least, most), 1.0)


def block_scale(f: Function, amax: str, spec: MXSpec, t: Input) -> str:
    """amax: (..., blocks, 1, ...) -> the scale of each block, float32, without the tensor scale t."""
    mode, scale = FLOAT_SCALE_MODES[spec.scale_mode], spec.scale_format
    step = "stepwise_quotient" if mode.reciprocal else "quotient"
    quotient = _step(f, spec, step, amax, spec.element.max_normal / spec.element.unit, t)
    if (zero := mode.zero_below(scale)) >= 0:
        quotient = f.op("Where", f.op("Greater", quotient, zero), quotient, mode.zero(scale))
    return _round(f, f.op("Clip", quotient, mode.least(scale), scale.max_value), scale, mode.rounds_up)


def _round(f: Function, quotient: str, scale: ScaleFormat, up: bool) -> str:
    if scale.dtype in _CASTS:
        return f.op("Cast", f.op("Cast", quotient, to=_CASTS[scale.dtype]), to=_TYPE.FLOAT)
    if scale.dtype.is_floating_point:
        return quotient
    return round_to_element(f, quotient, scale.grid, "up" if up else "even")


def times_tensor_scale(f: Function, scale: str, spec: MXSpec, t: Input) -> str:
    """Return what multiplies the codes of a block."""
    return _step(f, spec, "apply", scale, t) if spec.has_tensor_scale else scale


def in_units(f: Function, values: str, scale: str, spec: MXSpec, t: Input) -> str:
    """Return values in units of their block's scale."""
    if spec.multiplies_by_reciprocal:
        return f.op("Mul", values, _step(f, spec, "reciprocal", scale, t))
    return f.op("Div", values, times_tensor_scale(f, scale, spec, t))


def stored_scale(f: Function, scale: str, spec: MXSpec, is_native: bool = False) -> str:
    """scale: as pt2mx stores it, or in ONNX's own type -> float32."""
    if is_native or spec.scale_dtype.is_floating_point:
        return f.op("Cast", scale, to=_TYPE.FLOAT)
    return f.op("Gather", scale_table(spec).numpy(), f.op("Cast", scale, to=_TYPE.INT32))


def scale_table(spec: MXSpec) -> Tensor:
    """Return the value of each scale byte, (256,) float32."""
    if spec.has_power_of_two_scale:
        return torch.from_numpy(np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)))
    return value_of(torch.arange(256, dtype=torch.int32), spec)


def has_function(spec: MXSpec) -> bool:
    """Return whether functions compute the scales of a spec: without a search, and not rounded up to 16 bits."""
    rounds_up = not spec.has_power_of_two_scale and FLOAT_SCALE_MODES[spec.scale_mode].rounds_up
    return not spec.searches and not (rounds_up and spec.scale_dtype in _CASTS)
