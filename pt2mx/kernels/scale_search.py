"""Scales of blocks, and the search for the one that loses least. Part of the definition (`pt2mx.kernels.reference`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.elements import Prims
from pt2mx.modes import ROUNDINGS, ScaleFunction
from pt2mx.spec import MXSpec

_SIGN = -0x80000000


class BlockScale(Protocol):
    """The scales of blocks: (..., blocks, 1, ...), values are (..., blocks, block, ...) fp32."""

    @property
    def finite(self) -> Tensor:
        """True where a block is finite."""

    def divide(self, values: Tensor) -> Tensor:
        """Return values in units of their scale; NaN where the block is not finite."""

    def multiply(self, values: Tensor) -> Tensor:
        """Return numbers in units of their scale as values; NaN where the block is not finite."""

    def stored(self) -> Tensor:
        """Return the stored scales."""

    def value(self) -> Tensor:
        """Return the stored scales in fp32."""


def in_units(scale: BlockScale, blocks: Tensor, rounding: str) -> Tensor:
    """Return `scale.divide(blocks)`. It may underflow to zero, except where that would change the result of a directed
    rounding."""
    v = scale.divide(blocks)
    if not ROUNDINGS[rounding].directed:
        return v
    smallest = (blocks.view(torch.int32) & _SIGN | 1 << 23).view(torch.float32)  # +-2**-126
    return torch.where((v.abs() < 2.0**-126) & (blocks != 0), smallest, v)


def scale_by_function(function: ScaleFunction, blocks: Tensor, spec: MXSpec) -> tuple[Tensor, Tensor]:
    """Return what the function of a registered scale mode gives for blocks, (..., blocks, 1, ...) fp32, and whether
    that is a scale of a finite block."""
    at = spec.axis + 1
    rows = blocks.movedim(at, -1)
    scale = function(rows, spec.element)
    if not isinstance(scale, Tensor) or scale.shape != rows.shape[:-1] or not scale.is_floating_point():
        given = f"{scale.dtype} {tuple(scale.shape)}" if isinstance(scale, Tensor) else type(scale).__name__
        raise MXError(
            f"the function of scale_mode {spec.scale_mode!r} gives {given} for blocks {tuple(rows.shape)}: return a "
            f"float tensor {tuple(rows.shape[:-1])}, the scale of each block"
        )
    scale = scale.to(torch.float32).unsqueeze(-1).movedim(-1, at)
    finite = (blocks.abs().amax(at, keepdim=True) < torch.inf) & (scale >= 0) & (scale < torch.inf)
    return scale, finite


def squared_error_bits(block_size: int) -> int:
    """Return the bits of an error, as `least_squares` measures it, for which the sum of a block's squared errors fits
    int64."""
    return min(28, (62 - (block_size - 1).bit_length()) // 2)


def least_squares(
    blocks: Tensor,
    candidates: Sequence[Tensor],
    scale_of: Callable[[Tensor], BlockScale],
    ratio_of: Callable[[Tensor], Tensor],
    spec: MXSpec,
    prims: Prims,
) -> Tensor:
    """Return the candidate with the smallest sum of squared errors over the block; the first of equal ones.

    Errors are whole multiples of 2**(emax + 1 - bits) times a scale common to all candidates, so their sum is exact in
    any order. For stochastic rounding the errors of rounding to nearest count, so that a scale does not depend on the
    seed.

    Args:
        blocks: (..., blocks, block, ...) fp32.
        candidates: (..., blocks, 1, ...) int32 each, exponents or codes.
        scale_of: a candidate -> its scales.
        ratio_of: a candidate -> its scale in units of the common one, fp32.
    """
    rounding = "even" if ROUNDINGS[spec.rounding].random else spec.rounding
    bits, totals = squared_error_bits(spec.block_rows * spec.block_size), []
    for candidate in candidates:
        v = in_units(scale_of(candidate), blocks, rounding)
        rounded = prims.round_to_element(v, spec.element, rounding)
        error = (v - rounded).abs() * prims.realize(ratio_of(candidate))
        error = (error * 2.0 ** (bits - spec.element.emax - 1)).round().clamp(max=2.0**bits).to(torch.int64)
        totals.append((error * error).sum(spec.axis + 1, keepdim=True))
    best, least = candidates[0], totals[0]
    for candidate, total in zip(candidates[1:], totals[1:], strict=True):
        best = torch.where(total < least, candidate, best)
        least = torch.minimum(total, least)
    return best
