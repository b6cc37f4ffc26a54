"""Round values to the grid of an element, encode, decode and scale them, on fp32 bit patterns. Part of the definition.

`realize` and `realize_if_costly` return their argument here; for a compiler they are hints (`Prims`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pt2mx.formats import ElementFormat
from pt2mx.kernels import codebooks
from pt2mx.kernels.packing import trim_axis
from pt2mx.modes import ROUNDINGS

BIAS = 127  # of fp32 and of E8M0
NAN_SCALE = 0xFF
_INF = 0x7F800000


def realize_if_costly(x: Tensor) -> Tensor:
    """Return x, which both the scale of a block and its values need."""
    return x


def realize(shared: Tensor) -> Tensor:
    """Return what the values of a block share, (..., blocks, 1, ...)."""
    return shared


def divide(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y in fp32, rounded to nearest as IEEE 754 has it."""
    return x / y


def times_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    """blocks: (..., blocks, block, ...) fp32, scale: (..., blocks, 1, ...) int32, E8M0 -> blocks times their scales."""
    return times_pow2(blocks, scale - BIAS, scale != NAN_SCALE, realize)


def times_pow2(x: Tensor, exponent: Tensor, finite: Tensor, realize: Callable[[Tensor], Tensor]) -> Tensor:
    """x * 2**exponent, or NaN where the block is not finite; exponent: int32 in [-252, 252].

    In two steps: one factor could be an fp32 subnormal, which the processor may flush to zero
    (`torch.set_flush_denormal`).
    """
    half = exponent >> 1
    other_half = torch.where(finite, pow2(exponent - half), float("nan"))
    return x * realize(pow2(half)) * realize(other_half)


def pow2(exponent: Tensor) -> Tensor:
    """2**exponent in fp32; exponent: int32 in [-126, 127]."""
    return ((exponent + BIAS) << 23).view(torch.float32)


def scale_bytes(exponent: Tensor, finite: Tensor) -> Tensor:
    """exponent: int32 in [-127, 127] -> E8M0, uint8."""
    return torch.where(finite, exponent + BIAS, NAN_SCALE).to(torch.uint8)


def from_blocks(blocks: Tensor, axis: int, length: int) -> Tensor:
    """(..., blocks, block, ...) -> (..., length, ...), the filling of the last blocks cut off."""
    return trim_axis(blocks.flatten(axis, axis + 1), axis, length)


def round_to_element(v: Tensor, element: ElementFormat, rounding: str, random: Tensor | None = None) -> Tensor:
    """v: fp32 in units of the block's scale -> a neighbouring value of the element, saturated (step 4)."""
    if element.values:
        return codebooks.round_to_value(v, element, rounding, random)
    lowest, highest = ((e + BIAS) << 23 for e in (element.emin, element.emax))
    binade = (v.view(torch.int32) & _INF).clamp(lowest)  # bits of 2**floor(log2 |v|)
    if element.mantissa_bits == 0:  # the reciprocal of 2**127 would be subnormal
        binade = binade.clamp(max=highest)
    quantum = binade - (element.mantissa_bits << 23)
    # times the reciprocal, from its bits: a GPU's division is not exact even by a power of two
    units = v * ((2 * BIAS << 23) - quantum).view(torch.float32)
    p = ROUNDINGS[rounding].to_quanta(units, random) * quantum.view(torch.float32)
    p = p.clamp(element.lowest, element.max_normal)
    # two's complement has no negative zero
    return torch.where(p == 0, 0.0, p) if element.is_int else p


def encode(p: Tensor, element: ElementFormat) -> Tensor:
    """p: fp32 values of the element -> codes, int32 in [0, 2**bits)."""
    if element.values:
        return codebooks.encode(p, element)
    m = element.mantissa_bits
    normal = ((p.view(torch.int32) & 0x7FFFFFFF) >> (23 - m)) - ((BIAS - element.bias) << m)
    subnormal = (p.abs() * 2.0 ** (m - element.emin)).to(torch.int32)
    magnitude = torch.where(p.abs() < 2.0**element.emin, subnormal, normal)
    sign = p.view(torch.int32) < 0
    if element.is_int:
        return torch.where(sign, -magnitude, magnitude) & ((1 << element.bits) - 1)
    return torch.where(sign, magnitude | 1 << (element.bits - 1), magnitude)


def finite_magnitude(magnitude: Tensor, element: ElementFormat) -> Tensor:
    """magnitude: int32, codes without their sign -> values in fp32, as if there were no Inf and NaN."""
    m = element.mantissa_bits
    normal = ((magnitude + ((BIAS - element.bias) << m)) << (23 - m)).view(torch.float32)
    subnormal = magnitude.to(torch.float32) * 2.0 ** (element.emin - m)
    return torch.where(magnitude < 1 << m, subnormal, normal)


def decode(
    codes: Tensor, element: ElementFormat, finite: Callable[[Tensor, ElementFormat], Tensor] = finite_magnitude
) -> Tensor:
    """codes: int32 in [0, 2**bits) -> their values in fp32."""
    if element.values:
        return codebooks.decode(codes, element)
    sign_bit = 1 << (element.bits - 1)
    if element.is_int:
        return ((codes ^ sign_bit) - sign_bit).to(torch.float32) * 2.0 ** (element.emin - element.mantissa_bits)
    magnitude = codes & (sign_bit - 1)
    value = finite(magnitude, element)
    if element.has_inf:
        value = torch.where(magnitude == element.max_code + 1, float("inf"), value)
    if element.has_nan:
        value = torch.where(magnitude > element.max_code + element.has_inf, float("nan"), value)
    # Triton negates by subtracting from zero, which loses the sign of one
    return torch.where(codes < sign_bit, value, value * -1.0)


@functools.cache
def values_of_codes(element: ElementFormat) -> list[float]:
    """Return the value of each code of an element, in order. A compiler that traces the caller does not see this."""
    with _disable_current_modes():
        return decode(torch.arange(1 << element.bits, dtype=torch.int32, device="cpu"), element).tolist()


class Prims(Protocol):
    """The primitives of `pt2mx.kernels.reference`: this module, which is the definition, or one that gives a compiler
    other code for the same bits (`pt2mx.kernels.inductor`)."""

    def realize(self, shared: Tensor) -> Tensor:
        """Return values shared by a block, (..., blocks, 1, ...); tells a compiler to compute them once per block."""

    def realize_if_costly(self, x: Tensor) -> Tensor:
        """Return x, which both the scale of a block and its values need; tells a compiler to compute a costly x
        once."""

    def from_blocks(self, blocks: Tensor, axis: int, length: int) -> Tensor:
        """(..., blocks, block, ...) -> (..., length, ...), the filling of the last blocks cut off."""

    def divide(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x / y in fp32, rounded to nearest as IEEE 754 has it."""

    def times_scales(self, blocks: Tensor, scale: Tensor) -> Tensor:
        """blocks: fp32, scale: (..., blocks, 1, ...) int32, E8M0 -> the values that the codes represent."""

    def scale_bytes(self, exponent: Tensor, finite: Tensor) -> Tensor:
        """exponent: int32, and whether the block is finite -> E8M0, uint8."""

    def round_to_element(
        self, v: Tensor, element: ElementFormat, rounding: str, random: Tensor | None = None
    ) -> Tensor:
        """v: fp32 in units of the block's scale -> a neighbouring value of the element, saturated."""

    @property
    def decode(self) -> Decode:
        """codes: int32 in [0, 2**bits) -> their values in fp32."""


class Decode(Protocol):
    """A decoder of codes. Implementations may have more arguments, with defaults."""

    def __call__(self, codes: Tensor, element: ElementFormat) -> Tensor:
        """codes: int32 in [0, 2**bits) -> their values in fp32."""
