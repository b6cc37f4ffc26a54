"""The reference without bit casts: MX quantization in float arithmetic, for runtimes that cannot read a float's bits.

Every step is exact, so that the results have the bits of `pt2mx.kernels.reference`. Powers of two come from three
operations (`power_below`), codes are looked up in a table that the graph computes, and what is left of bit casts
becomes arithmetic (`view_dtype`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels import elements, reference
from pt2mx.kernels.elements import BIAS, NAN_SCALE, Prims
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.spec import MXSpec

# with three functions below, these are the primitives (`Prims`)
divide = elements.divide
from_blocks = elements.from_blocks
realize = elements.realize
realize_if_costly = elements.realize_if_costly
scale_bytes = elements.scale_bytes

_MANTISSA = 0x7FFFFF
_INF = 0x7F800000
_NAN = 0x7FC00000
_SMALLEST = 2.0**-126  # of normal numbers


def power_below(x: Tensor, factor: float = 1.0) -> Tensor:
    """x: fp32 of at least 2**-126, with x * factor * 2**23 finite -> the power of two at or below each, times `factor`,
    a power of two. Smaller values give at most the result of 2**-126.

    Source: Rump, Ogita, Oishi, "Accurate Floating-Point Summation, Part I" (2008), `ufp`.
    """
    # each product has to be rounded. The magnitude and the minimum, which change nothing, keep compilers from merging
    # two factors (OpenVINO, XLA) and from fusing a product and a difference. XLA drops an abs of powers there
    q = (x * ((1 + 2.0**-23) * 2.0**23 * factor)).abs()
    return q - torch.minimum(q * (1 - 2.0**-24), q)


def round_to_element(v: Tensor, element: ElementFormat, rounding: str, random: Tensor | None = None) -> Tensor:
    """v: fp32 in units of the block's scale -> a neighbouring value of the element, saturated (step 4)."""
    v = v.clamp(element.lowest, element.max_normal)
    least = 2.0 ** (element.emin - element.mantissa_bits)
    if element.is_int:
        p = ROUNDINGS[rounding].to_quanta(v * (1 / least), random) * least
    else:
        quantum = power_below(v.abs(), 2.0**-element.mantissa_bits).clamp(min=least)
        p = ROUNDINGS[rounding].to_quanta(v / quantum, random) * quantum
    p = p.clamp(element.lowest, element.max_normal)
    # two's complement has no negative zero
    return torch.where(p == 0, 0.0, p) if element.is_int else p


def decode(codes: Tensor, element: ElementFormat) -> Tensor:
    """codes: int32 in [0, 2**bits) -> their values in fp32, looked up."""
    if element.is_int:
        return elements.decode(codes, element)
    every = torch.arange(1 << element.bits, dtype=torch.int32, device=codes.device)
    return elements.decode(every, element, _finite_magnitude)[codes]


def _finite_magnitude(magnitude: Tensor, element: ElementFormat) -> Tensor:
    m = element.mantissa_bits
    significand = 1 + (magnitude & ((1 << m) - 1)).to(torch.float32) * 2.0**-m
    normal = significand * _power((magnitude >> m) - element.bias)
    return torch.where(magnitude < 1 << m, magnitude.to(torch.float32) * 2.0 ** (element.emin - m), normal)


def times_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    """blocks: (..., blocks, block, ...) fp32, scale: (..., blocks, 1, ...) int32, E8M0 -> blocks times their scales,
    looked up."""
    every = torch.arange(NAN_SCALE + 1, dtype=torch.int32, device=scale.device)
    half = (every - BIAS) >> 1  # two factors, because 2**-127 is subnormal
    other_half = torch.where(every == NAN_SCALE, float("nan"), _power(every - BIAS - half))
    return blocks * _power(half)[scale] * other_half[scale]


def fake_quantize(
    x: Tensor,
    spec: MXSpec,
    random: Tensor | None = None,
    prims: Prims = elements,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x: (..., n, ...) -> `reference.fake_quantize(x, spec, random, prims, tensor_scale)` to the bit, in fewer
    operations for scales that are powers of two, without a search."""
    if not _is_direct(spec):
        return reference.fake_quantize(x, spec, random, prims, tensor_scale)
    values, scale, factor = _direct_blocks(x, spec, random)
    return reference.from_blocks((values / factor * scale).to(x.dtype), spec, x.shape, elements)


def quantize(
    x: Tensor, spec: MXSpec, prims: Prims = elements, tensor_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x: (..., n, ...) -> what the codes of `reference.quantize(x, spec)` stand for: the values of the element,
    (..., n, ...) fp32, 0 in blocks that are not finite, and the scales, (..., blocks, ...) fp32, NaN for these. The
    scale of the tensor is part of neither. Blocks have one row."""
    if _is_direct(spec):
        values, scale, factor = _direct_blocks(x, spec)
        finite, scale = torch.isfinite(scale), scale / factor
    else:
        of_blocks, values = reference.quantize_blocks(x, spec, None, prims, tensor_scale)
        finite, scale = of_blocks.finite, of_blocks.value()
    values = reference.from_blocks(torch.where(finite, values, 0.0), spec, x.shape, elements)
    return values, scale.squeeze(spec.axis + 1)


def _direct_blocks(x: Tensor, spec: MXSpec, random: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x: (..., n, ...) -> values of the element (..., blocks, block, ...), the scales of blocks times a factor
    (..., blocks, 1, ...), NaN for those that are not finite, and the factor."""
    blocks = reference.to_blocks(x.to(torch.float32), spec)
    amax = blocks.abs().amax(spec.axis + 1, keepdim=True)
    unit = _unit_of(amax, spec)
    # 2**-127 is subnormal, which a processor may flush to zero: divide by twice that, and multiply by two
    is_subnormal = unit < _SMALLEST
    unit, factor = unit.clamp(min=_SMALLEST), torch.where(is_subnormal, 2.0, torch.ones_like(unit))
    v = blocks / unit * factor
    random = None if random is None else reference.to_blocks(random, spec)
    values = round_to_element(v, spec.element, spec.rounding, random)
    return values, torch.where(amax < float("inf"), unit, float("nan")), factor


def _is_direct(spec: MXSpec) -> bool:
    is_power = spec.has_power_of_two_scale and spec.scale_exp_bits == 8
    return is_power and not spec.searches and not ROUNDINGS[spec.rounding].directed


def _unit_of(amax: Tensor, spec: MXSpec) -> Tensor:
    """amax: (..., blocks, 1, ...) fp32 -> the scale of each block."""
    emax = spec.element.emax
    # the maximum replaces Inf, and numbers whose power would overflow; 2**23 undoes the factor 2**-23
    power = power_below(amax.clamp(max=1.5 * 2.0**127), 2.0**-23)
    unit = (power * 2.0 ** (23 - emax)).clamp(min=2.0**-BIAS)
    threshold = SCALE_MODES[spec.scale_mode].threshold(spec.element)
    if threshold == _MANTISSA:  # never rounded up
        return unit
    highest = (1 + max(threshold, -0.5) * 2.0**-23) * 2.0**emax  # -1: the float below a power of two
    factor = (amax / unit / highest).ceil()  # 1 or 2; 0 for zeros
    return (unit * factor).clamp(2.0**-BIAS, 2.0**BIAS)


def view_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.view(dtype)` between float32 and int32, or bfloat16 and int16, by arithmetic. A NaN loses its sign and
    its payload."""
    if (x.dtype, dtype) == (torch.float32, torch.int32):
        return _bits_of(x)
    if (x.dtype, dtype) == (torch.int32, torch.float32):
        return _float_of(x)
    if (x.dtype, dtype) == (torch.bfloat16, torch.int16):
        return (_bits_of(x.to(torch.float32)) >> 16).to(torch.int16)
    if (x.dtype, dtype) == (torch.int16, torch.bfloat16):
        return _float_of(x.to(torch.int32) << 16).to(torch.bfloat16)
    return x if x.dtype == dtype else NotImplemented


def _bits_of(x: Tensor) -> Tensor:
    a = x.abs()
    large = a >= 2.0**64  # scaled down, so that nothing overflows
    scaled = torch.where(large, a * 2.0**-64, a).clamp(min=_SMALLEST, max=2.0**64)
    power = power_below(scaled)
    exponent = power.log2().round().to(torch.int32) + torch.where(large, 64 + BIAS, BIAS).to(torch.int32)
    fraction = ((scaled / power - 1) * 2.0**23).to(torch.int32)
    subnormal = (a.clamp(max=_SMALLEST) * 2.0**75 * 2.0**74).to(torch.int32)  # 2**149 is no float32
    bits = torch.where(a < _SMALLEST, subnormal, exponent * (1 << 23) + fraction)
    bits = torch.where(a == float("inf"), _INF, bits)
    bits = torch.where(torch.isnan(a), _NAN, bits)
    negative = torch.where(x == 0, 1 / x, x) < 0  # so that -0 is negative, too
    return torch.where(negative, bits | -0x80000000, bits)


def _float_of(bits: Tensor) -> Tensor:
    magnitude = bits & 0x7FFFFFFF
    exponent, fraction = magnitude >> 23, (magnitude & _MANTISSA).to(torch.float32)
    half = (exponent - BIAS) >> 1
    normal = (1 + fraction * 2.0**-23) * _power(half) * _power(exponent - BIAS - half)
    value = torch.where(exponent == 0, fraction * 2.0**-75 * 2.0**-74, normal)
    value = torch.where(magnitude == _INF, float("inf"), value)
    value = torch.where(magnitude > _INF, float("nan"), value)
    return torch.where(bits < 0, -value, value)


def _power(exponent: Tensor) -> Tensor:
    """exponent: int32 in [-64, 64] -> 2**exponent, exact also where the runtime's power is off by a few bits."""
    return power_below(torch.pow(2.0, exponent.to(torch.float32)) * 1.25)
