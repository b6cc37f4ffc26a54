"""The definition of MX quantization, in plain torch operations that Inductor can trace.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3; the steps are those of the design page.
Everything is computed in fp32 on bit patterns: a floating-point log2 is wrong one ulp below a power of two, and in
bf16 one block in 150 would get another exponent. Every value that a kernel needs to know of a format comes from
`pt2mx.formats` and `pt2mx.modes`; `axis` is non-negative here and inputs are checked by the callers in `pt2mx.ops`.
`random` are the numbers of stochastic rounding (`pt2mx.kernels.philox`), in the shape of x. `prims` are the
primitives, by default those of `pt2mx.kernels.elements`; others give the same bits.
"""

import torch
from torch import Tensor

from pt2mx.kernels import elements
from pt2mx.kernels.axis import split_axis, trim_axis
from pt2mx.kernels.elements import BIAS, Prims, pow2, times_pow2
from pt2mx.kernels.packing import pack, unpack
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.spec import MXSpec

_MANTISSA = 0x7FFFFF
_INF = 0x7F800000
_SIGN = -0x80000000


def quantize(x: Tensor, spec: MXSpec, random: Tensor | None = None, prims: Prims = elements) -> tuple[Tensor, Tensor]:
    """x: (..., n, ...) fp32, fp16 or bf16 -> scale (..., ceil(n / block), ...) uint8, data (..., bytes, ...) uint8."""
    exponent, finite, values = _quantize_blocks(x, spec, random, prims)
    codes = elements.encode(torch.where(finite, values, 0.0), spec.element)
    codes = prims.from_blocks(codes, spec.axis, x.shape[spec.axis])
    scale = _scale_bytes(exponent, finite, spec, x.shape[spec.axis], prims)
    return scale, pack(codes, spec.axis, spec.element.bits)


def scales(x: Tensor, spec: MXSpec) -> Tensor:
    """x: (..., n, ...) -> the scales that `quantize` gives, (..., ceil(n / block), ...) uint8, without the codes."""
    exponent, finite = shared_exponent(_to_blocks(x.to(torch.float32), spec), spec)
    return _scale_bytes(exponent, finite, spec, x.shape[spec.axis])


def dequantize(
    data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int, prims: Prims = elements
) -> Tensor:
    """data: (..., bytes, ...) uint8, scale: (..., ceil(length / block), ...) uint8 -> (..., length, ...) `dtype`."""
    codes = trim_axis(unpack(data, spec.axis, spec.element.bits), spec.axis, length)
    blocks = prims.decode(_to_blocks(codes, spec), spec.element)  # (..., blocks, block, ...)
    scale = split_axis(scale.to(torch.int32), spec.axis, 1)  # (..., blocks, 1, ...), filled as the codes are
    return prims.from_blocks(prims.times_scales(blocks, scale).to(dtype), spec.axis, length)


def fake_quantize(x: Tensor, spec: MXSpec, random: Tensor | None = None, prims: Prims = elements) -> Tensor:
    """x: (..., n, ...) -> dequantize(quantize(x)) to the bit, in x's dtype."""
    exponent, finite, values = _quantize_blocks(x, spec, random, prims)
    scaled = times_pow2(values, exponent, finite, prims.realize)
    return prims.from_blocks(scaled.to(x.dtype), spec.axis, x.shape[spec.axis])


def clip_gradient(grad: Tensor, x: Tensor, spec: MXSpec, prims: Prims = elements) -> Tensor:
    """grad, x: (..., n, ...) -> grad, zero where x is beyond the largest value of its block's scale."""
    blocks = _to_blocks(x.to(torch.float32), spec)
    exponent, finite = shared_exponent(blocks, spec, prims)
    v = times_pow2(blocks, -exponent, finite, prims.realize)
    saturated = (v > spec.element.max_normal) | (v < spec.element.lowest)
    return grad.masked_fill(prims.from_blocks(saturated, spec.axis, x.shape[spec.axis]), 0.0)


def shared_exponent(blocks: Tensor, spec: MXSpec, prims: Prims = elements) -> tuple[Tensor, Tensor]:
    """blocks: (..., blocks, block, ...) fp32 -> exponent (..., blocks, 1, ...) int32 in the range of the scale, and
    whether the block is finite. Design: numerics, steps 1 to 3.

    In an fp32 subnormal amax the mantissa field counts from 2**-149 without a hidden bit; only a format with emax 0
    can tell 2**-127 from 2**-126 there, and `(threshold + 2**23) / 2` is the same threshold in those units.
    """
    # bits compare like the floats they are; a compiled amax may return a NaN with its sign bit set
    amax = blocks.abs().amax(spec.axis + 1, keepdim=True).view(torch.int32) & 0x7FFFFFFF
    lowered: int | Tensor = spec.element.emax
    if spec.scale_exp_bits > 8:  # below E8M0's range the exponents of fp32 subnormals differ
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
        exponent = _least_squares(blocks, exponent, finite, spec, mode.exponent_offsets, prims)
    return exponent, finite


def squared_error_bits(block_size: int) -> int:
    """Bits of an error, as `_least_squares` measures it, with which the sum of the squares of a block fits int64."""
    return min(28, (62 - (block_size - 1).bit_length()) // 2)


def _least_squares(
    blocks: Tensor, exponent: Tensor, finite: Tensor, spec: MXSpec, exponent_offsets: tuple[int, ...], prims: Prims
) -> Tensor:
    """Of `exponent` with each offset added the one with the least sum of squared errors, of equal ones the first.

    Errors are whole multiples of 2**(emax + 1 - bits) of the scale `exponent`, so that their sum is exact and the same
    in whatever order a kernel adds. Of a random rounding the error is that of rounding to nearest: a scale does not
    depend on the seed.
    """
    rounding = "even" if ROUNDINGS[spec.rounding].random else spec.rounding
    bits = squared_error_bits(spec.block_size)
    candidates, totals = [_clamp(exponent + change, spec) for change in exponent_offsets], []
    for candidate in candidates:
        v = _in_units(blocks, candidate, finite, rounding, prims)
        rounded = prims.round_to_element(v, spec.element, rounding)
        error = (v - rounded).abs() * prims.realize(pow2(candidate - exponent))
        error = (error * 2.0 ** (bits - spec.element.emax - 1)).round().clamp(max=2.0**bits).to(torch.int64)
        totals.append((error * error).sum(spec.axis + 1, keepdim=True))
    best, least = candidates[0], totals[0]
    for candidate, total in zip(candidates[1:], totals[1:], strict=True):
        best = torch.where(total < least, candidate, best)
        least = torch.minimum(total, least)
    return best


def _quantize_blocks(x: Tensor, spec: MXSpec, random: Tensor | None, prims: Prims) -> tuple[Tensor, Tensor, Tensor]:
    """Exponent and finiteness (..., blocks, 1, ...), element values (..., blocks, block, ...) of the finite blocks."""
    blocks = _to_blocks(prims.realize_if_costly(x).to(torch.float32), spec)
    exponent, finite = shared_exponent(blocks, spec, prims)
    if random is not None:
        random = _to_blocks(random, spec)
    v = _in_units(blocks, exponent, finite, spec.rounding, prims)
    return exponent, finite, prims.round_to_element(v, spec.element, spec.rounding, random)


def _in_units(blocks: Tensor, exponent: Tensor, finite: Tensor, rounding: str, prims: Prims) -> Tensor:
    """`blocks * 2**-exponent`, which may round to zero but where that would change what a directed rounding gives."""
    v = times_pow2(blocks, -exponent, finite, prims.realize)
    if not ROUNDINGS[rounding].directed:
        return v
    smallest = (blocks.view(torch.int32) & _SIGN | 1 << 23).view(torch.float32)  # +-2**-126
    return torch.where((v.abs() < 2.0**-126) & (blocks != 0), smallest, v)


def _to_blocks(x: Tensor, spec: MXSpec) -> Tensor:
    """(..., n, ...) -> (..., blocks, block, ...), filled with zeros (`group_count`)."""
    length, block = x.shape[spec.axis], spec.block_size
    if isinstance(length, int):
        block = max(1, min(block, length))  # one short block needs no filling
    return split_axis(x, spec.axis, block)


def _clamp(exponent: Tensor, spec: MXSpec) -> Tensor:
    """`exponent` in the range of the scale. No block needs one below -213, and `times_pow2` takes -252."""
    limit = 2 ** (spec.scale_exp_bits - 1) - 1
    return exponent.clamp(max(-limit, -252), limit)


def _scale_bytes(exponent: Tensor, finite: Tensor, spec: MXSpec, length: int, prims: Prims = elements) -> Tensor:
    scale = prims.scale_bytes(exponent, finite).squeeze(spec.axis + 1)
    return trim_axis(scale, spec.axis, -(-length // spec.block_size))
