"""The definition of a matmul whose products are added in a register of limited precision, in plain torch operations.

    total = 0                                            in float32
    for each run of `promotion` products:
        register = 0
        for each group of `group` products in it:
            register = round(register + the products)    added in float64, one after the other
        total = total + register

float64 holds products of float32 values, and the sums of a group of products of MX values. A sum is rounded to bfloat16
and float16 by way of float32, as torch casts.

The FP8 tensor cores of NVIDIA's Hopper GPUs align the products of a group and the register before they add them: to the
largest of their exponents, where a product's exponent is the sum of its factors'. They cut off what is more than
`fraction bits` below it, and then what the sum has behind these bits. Sources: DeepSeek-V3 (arXiv:2412.19437), sections
3.3.2 and 3.5.2: 32 products are aligned, 14 bits stay, and float32 sums after 128 products repair it. SageAttention2
(Zhang et al., arXiv:2411.10958): the register has 8 exponent and 13 mantissa bits. MMA-Sim (Xie et al.,
arXiv:2511.10909), a model that was tested on the hardware: exponents are added, not taken from the product, and both
cuts are toward zero. One thing differs: the hardware aligns a subnormal FP8 value like the smallest normal one, and a
dequantized value does not tell that it was subnormal.

An NVIDIA H200 gave the same bits in 64 random products of FP8 (`torch._scaled_mm` of torch 2.11, 2026-11-30): with
`use_fast_accum` those of hopper(13){32,row}, without it those of hopper(13){32,128}. Where subnormal values have the
largest exponent, up to 0.12% of the values differ (E4M3) or 0.8% (E5M2); with exponents as the hardware takes them,
none does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pt2mx.accumulator import Accumulator

_BIAS, _MANTISSA, _EXPONENT = 1023, 52, 0x7FF
#: beyond the exponents of products of float32 values
_FAR = 400


def matmul(x: Tensor, other: Tensor, accumulator: Accumulator) -> Tensor:
    """x: (*batch, M, K), other: (*batch, K, N) -> (*batch, M, N) float32. An Inf or NaN stays what float64 makes it."""
    x, other, k = x.double(), other.double(), x.shape[-1]
    zero = x[..., :, :0] @ other[..., :0, :]  # (*batch, M, N)
    total = zero.float()
    for start in range(0, k, accumulator.promotion):
        register = zero
        for first in range(start, min(start + accumulator.promotion, k), accumulator.group):
            group = slice(first, min(first + accumulator.group, k))
            register = _add(register, x[..., group], other[..., group, :], accumulator)
        total = total + register.float()
    return total


def _add(register: Tensor, x: Tensor, other: Tensor, accumulator: Accumulator) -> Tensor:
    """register: (*batch, M, N), x: (*batch, M, group), other: (*batch, group, N) -> (*batch, M, N), all float64."""
    terms = [register, *_outer(torch.mul, x, other)]
    exact = aligned = functools.reduce(torch.add, terms)
    if accumulator.kind == "hopper":
        unit = _unit(register, x, other, accumulator.numbers[0])
        aligned = functools.reduce(torch.add, [(term / unit).trunc() * unit for term in terms])
    rounded = _ROUND[accumulator.kind](aligned, *accumulator.numbers)
    return torch.where(torch.isfinite(exact), rounded, exact)


def _outer(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, other: Tensor) -> list[Tensor]:
    """x: (*batch, M, group), other: (*batch, group, N) -> group times (*batch, M, N)."""
    return [function(x[..., :, i, None], other[..., None, i, :]) for i in range(x.shape[-1])]


def _unit(register: Tensor, x: Tensor, other: Tensor, bits: int) -> Tensor:
    """Return the power of two that is `bits` below the largest exponent of products and register."""
    exponents = [_exponent(register), *_outer(torch.add, _exponent(x), _exponent(other))]
    largest = functools.reduce(torch.maximum, exponents).clamp(-_FAR, _FAR)
    return (largest - bits + _BIAS << _MANTISSA).view(torch.float64)


def _exponent(x: Tensor) -> Tensor:
    return (x.view(torch.int64) >> _MANTISSA & _EXPONENT) - _BIAS


def _cut(y: Tensor, bits: int) -> Tensor:
    """Keep `bits` fraction bits."""
    return (y.view(torch.int64) >> _MANTISSA - bits << _MANTISSA - bits).view(torch.float64).float().double()


def _round_fixed(y: Tensor, integer_bits: int, fraction_bits: int) -> Tensor:
    scale, end = 2.0**fraction_bits, 2.0 ** (integer_bits + fraction_bits)
    return (y * scale).round().clamp(-end, end - 1) / scale


#: kind -> the rounding of a sum (*batch, M, N) float64 to its register, with the numbers of the accumulator
_ROUND: dict[str, Callable[..., Tensor]] = {
    "float32": lambda y: y.float().double(),
    "bfloat16": lambda y: y.float().bfloat16().double(),
    "float16": lambda y: y.float().half().double(),
    "fixed": _round_fixed,
    "hopper": _cut,
}
