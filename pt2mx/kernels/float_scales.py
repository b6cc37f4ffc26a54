"""Scales with a significand, such as E4M3, with or without a float32 scale of the whole tensor. Part of the definition
(`pt2mx.kernels.reference`).

Every step is one float32 operation of IEEE 754, so that all devices give the same bits: `Prims.divide` is correctly
rounded, and no sum follows a multiplication, with which a compiler could fuse it. Constants are divided as tensors,
because PyTorch multiplies by the reciprocal of a number on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.kernels import elements
from pt2mx.kernels.elements import Prims, decode, divide, encode, round_to_element
from pt2mx.kernels.scale_search import least_squares, scale_by_function
from pt2mx.modes import FLOAT_SCALE_MODES
from pt2mx.scale_formats import TENSOR_SCALE_RANGE
from pt2mx.spec import MXSpec

#: a magnitude beyond every element, whose quantum is a normal number
_LARGEST_UNITS = 2.0**126
#: bytes of a float -> integers of that size, and the bits that they use
_PATTERNS = {2: (torch.int16, 0xFFFF), 4: (torch.int32, -1)}


@dataclass(frozen=True)
class TensorScale:
    """The steps that read the scale of a tensor, t, in float32 operations. The last argument of each step is the
    function that divides, by default `elements.divide`.

    Args:
        of_amax: (amax of the tensor, the value of the element's largest number at the largest scale) -> t.
        quotient: (amax of a block, largest number of the element, t) -> the block's scale before it is rounded.
        stepwise_quotient: the same, for modes that multiply by a reciprocal.
        apply: (scale of a block, t) -> the factor of codes.
        reciprocal: (scale of a block, t) -> the factor of values, for modes that multiply by a reciprocal.
    """

    of_amax: Callable[..., Tensor]
    quotient: Callable[..., Tensor]
    stepwise_quotient: Callable[..., Tensor]
    apply: Callable[..., Tensor]
    reciprocal: Callable[..., Tensor]


#: by the field `tensor` of a scale format
TENSOR_SCALES = {
    "": TensorScale(
        of_amax=lambda amax, largest, divide=divide: torch.ones_like(amax),
        quotient=lambda amax, most, t, divide=divide: divide(amax, most),
        stepwise_quotient=lambda amax, most, t, divide=divide: divide(amax, most),
        apply=lambda scale, t, divide=divide: scale,
        reciprocal=lambda scale, t, divide=divide: divide(_one(scale), scale),
    ),
    "factor": TensorScale(
        of_amax=lambda amax, largest, divide=divide: divide(amax, largest),
        quotient=lambda amax, most, t, divide=divide: divide(amax, most * t),
        stepwise_quotient=lambda amax, most, t, divide=divide: divide(divide(amax, most), t),
        apply=lambda scale, t, divide=divide: scale * t,
        reciprocal=lambda scale, t, divide=divide: divide(divide(_one(t), t), scale),
    ),
    "divisor": TensorScale(
        # two steps, as PyTorch divides a number
        of_amax=lambda amax, largest, divide=divide: divide(_one(amax), amax) * largest,
        quotient=lambda amax, most, t, divide=divide: divide(amax, most) * t,
        stepwise_quotient=lambda amax, most, t, divide=divide: divide(amax, most) * t,
        apply=lambda scale, t, divide=divide: divide(scale, t),
        reciprocal=lambda scale, t, divide=divide: divide(t, scale),
    ),
}


def steps_of(spec: MXSpec) -> TensorScale:
    """Return the steps with the tensor scale of a spec."""
    return TENSOR_SCALES[spec.scale_format.tensor]


@dataclass(frozen=True)
class FloatScale:
    """Scales by their codes, as `BlockScale`."""

    code: Tensor
    finite: Tensor
    tensor_scale: Tensor
    spec: MXSpec
    prims: Prims

    def divide(self, values: Tensor) -> Tensor:
        scale, steps, divide = self.value(), steps_of(self.spec), self.prims.divide
        if self.spec.multiplies_by_reciprocal:
            v = values * self.prims.realize(steps.reciprocal(scale, self.tensor_scale, divide))
        else:
            v = divide(values, self.prims.realize(steps.apply(scale, self.tensor_scale, divide)))
        unit = self.spec.element.unit
        # a value far beyond a static tensor scale overflows, and would have no binade to be rounded in
        return (v if unit == 1 else v * unit).clamp(-_LARGEST_UNITS, _LARGEST_UNITS)

    def multiply(self, values: Tensor) -> Tensor:
        return times(values, self.value(), self.tensor_scale, self.spec, self.prims)

    def stored(self) -> Tensor:
        scale = self.spec.scale_format
        code = torch.where(self.finite, self.code, scale.nan)
        if not scale.dtype.is_floating_point:
            return code.to(scale.dtype)
        integer, _ = _PATTERNS[scale.dtype.itemsize]
        return code.to(integer).view(scale.dtype)

    def value(self) -> Tensor:
        return torch.where(self.finite, value_of(self.code, self.spec), float("nan"))


def scale_of(blocks: Tensor, spec: MXSpec, tensor_scale: Tensor | None, prims: Prims) -> FloatScale:
    """Return the scales of blocks; without a tensor scale where the format has none."""
    mode = FLOAT_SCALE_MODES[spec.scale_mode]
    t = tensor_scale_of(tensor_scale, spec, blocks)
    amax = blocks.abs().amax(spec.axis + 1, keepdim=True)
    least, most = TENSOR_SCALE_RANGE
    finite = (amax < torch.inf) & (t >= least) & (t <= most)
    of_element = _constant(spec.element.max_normal / spec.element.unit, amax)
    steps = steps_of(spec)
    quotient = (steps.stepwise_quotient if mode.reciprocal else steps.quotient)(amax, of_element, t, prims.divide)
    if mode.function is not None:
        scale, has_scale = scale_by_function(mode.function, blocks, spec)
        quotient, finite = steps.quotient(scale * spec.element.unit, _one(t), t, prims.divide), finite & has_scale
    codes = [_round(quotient if f == 1 else quotient * f, spec) for f in mode.factors(spec.element)]
    codes = [
        (code + offset).clamp(*code_range(spec)) if offset else code for code in codes for offset in mode.code_offsets
    ]
    code = codes[0]
    if len(codes) > 1:
        first = value_of(code, spec)
        code = least_squares(
            blocks,
            codes,
            lambda candidate: FloatScale(candidate, finite, t, spec, prims),
            lambda candidate: prims.divide(value_of(candidate, spec), first),
            spec,
            prims,
        )
    return FloatScale(code, finite, t, spec, prims)


def times_stored(blocks: Tensor, codes: Tensor, spec: MXSpec, tensor_scale: Tensor | None, prims: Prims) -> Tensor:
    """Return values in units of their scale, times the scales of these codes."""
    t = tensor_scale_of(tensor_scale, spec, blocks)
    return times(blocks, value_of(codes, spec), t, spec, prims)


def multiplier_of(stored: Tensor, spec: MXSpec, tensor_scale: Tensor | None, prims: Prims = elements) -> Tensor:
    """stored: scales -> the factors of the element's values, fp32; NaN for the scale NaN."""
    t = tensor_scale_of(tensor_scale, spec, stored)
    factor, unit = steps_of(spec).apply(scale_values(stored, spec), t, prims.divide), spec.element.unit
    return factor if unit == 1 else factor / unit


def tensor_scale(x: Tensor, spec: MXSpec, prims: Prims = elements) -> Tensor:
    """x: any shape -> the scale of the tensor, () fp32, from its finite values; 1 for a tensor of zeros."""
    amax = finite_amax(x)
    room = FLOAT_SCALE_MODES[spec.scale_mode].tensor_room(spec.scale_format)
    largest = _constant(spec.element.max_normal / spec.element.unit * room, amax)
    t = steps_of(spec).of_amax(amax, largest, prims.divide)
    return torch.where(amax == 0, 1.0, t.clamp(*TENSOR_SCALE_RANGE))


def finite_amax(x: Tensor) -> Tensor:
    """x: any shape -> the largest magnitude of its finite values, () fp32; 0 where there is none."""
    magnitude = x.to(torch.float32).nan_to_num(0.0, 0.0, 0.0).abs()
    return magnitude.amax() if x.numel() else magnitude.sum()


def tensor_scale_of(tensor_scale: Tensor | None, spec: MXSpec, blocks: Tensor) -> Tensor:
    """Return a tensor scale, () fp32, or one of each matrix, (E, 1, ...) with the dimensions of `blocks`: 1 for a
    format without."""
    if tensor_scale is None:
        return _constant(1.0, blocks)
    return tensor_scale.view(-1, *[1] * (blocks.dim() - 1)) if has_each(tensor_scale) else tensor_scale.reshape(())


def has_each(tensor_scale: Tensor | None) -> bool:
    """Return whether each of several matrices has a tensor scale of its own: (E,) fp32."""
    return tensor_scale is not None and tensor_scale.dim() > 0 and tensor_scale.shape[0] != 1


def codes_of(stored: Tensor) -> Tensor:
    """stored: scales of any format -> their codes, int32."""
    if not stored.dtype.is_floating_point:
        return stored.to(torch.int32)
    integer, used = _PATTERNS[stored.dtype.itemsize]
    return stored.view(integer).to(torch.int32) & used


def scale_values(stored: Tensor, spec: MXSpec) -> Tensor:
    """stored: scales of any format -> the scales in fp32."""
    return value_of(codes_of(stored), spec)


def value_of(codes: Tensor, spec: MXSpec) -> Tensor:
    """codes: int32 -> the scales in fp32."""
    scale = spec.scale_format
    if not scale.dtype.is_floating_point:
        return decode(codes, scale.grid)
    integer, _ = _PATTERNS[scale.dtype.itemsize]
    return codes.to(integer).view(scale.dtype).to(torch.float32)


def code_of(value: Tensor, spec: MXSpec) -> Tensor:
    """value: fp32 up to the largest scale -> the code of the nearest scale, ties to even."""
    scale = spec.scale_format
    if not scale.dtype.is_floating_point:
        return encode(round_to_element(value, scale.grid, "even"), scale.grid)
    return codes_of(value.to(scale.dtype))


def code_range(spec: MXSpec) -> tuple[int, int]:
    """Return the codes of the smallest and the largest scale that quantization gives."""
    scale, grid = spec.scale_format, spec.scale_format.grid
    return round(scale.min_value / 2.0 ** (grid.emin - grid.mantissa_bits)), grid.max_code


def _round(quotient: Tensor, spec: MXSpec) -> Tensor:
    """Return the code of the scale that a quotient becomes."""
    scale, mode = spec.scale_format, FLOAT_SCALE_MODES[spec.scale_mode]
    quotient = torch.where(quotient <= mode.zero_below(scale), mode.zero(scale), quotient)
    quotient = quotient.clamp(mode.least(scale), scale.max_value)
    code = code_of(quotient, spec)
    return code + (value_of(code, spec) < quotient).to(torch.int32) if mode.rounds_up else code


def times(values: Tensor, scale: Tensor, t: Tensor, spec: MXSpec, prims: Prims) -> Tensor:
    """Return values in units of their scale, times scales in fp32, (..., blocks, 1, ...), and the tensor scale t."""
    steps, unit = steps_of(spec), spec.element.unit
    factor = prims.realize(steps.apply(scale, t, prims.divide))
    return (values if unit == 1 else values * (1 / unit)) * factor


def _one(like: Tensor) -> Tensor:
    return _constant(1.0, like)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)
