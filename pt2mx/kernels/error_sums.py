"""The definition of the sums of quantization errors, in plain torch operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pt2mx.kernels.reference import of_each_value
from pt2mx.spec import MXSpec

__all__ = ["error_sums"]


def error_sums(x: Tensor, y: Tensor, scale: Tensor, spec: MXSpec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return sums over the blocks of a tensor whose scale is above zero; the first sum is over all blocks.

    Args:
        x: (..., n, ...) float32, float16 or bfloat16.
        y: what its quantization gives, of the same shape and dtype.
        scale: (..., blocks, ...) float32, the scale of each block, NaN for a block with an Inf or a NaN.
        spec: the format.

    Returns:
        0-d tensors. Counts, int64: of Inf and NaN, of values that saturate, and of values that become zero. Sums of
        squares, float64: of the values, and of their errors.
    """
    row_axis = spec.row_axis(x.dim()) if spec.block_rows > 1 else None
    for axis, block in ((spec.axis, spec.block_size), (row_axis, spec.block_rows)):
        if axis is not None:
            scale = of_each_value(scale, axis, block, x.shape[axis])
    has_scale = scale > 0
    values, results = (torch.where(has_scale, tensor.float(), 0.0) for tensor in (x, y))
    # the ends are exact in float32: elements have few bits. A comparison with NaN is false
    saturated = (values > spec.element.max_normal * scale) | (values < spec.element.lowest * scale)
    return (
        (~(x.abs() < math.inf)).count_nonzero(),  # `isfinite` takes twice as long, and Inductor takes x * 0 for 0
        saturated.count_nonzero(),
        values.count_nonzero() - results.count_nonzero(),  # no format changes a zero
        _power(values),
        _power(values - results),
    )


def _power(x: Tensor) -> Tensor:
    """Return the sum of squares, float64."""
    wide = x.flatten().double()
    return torch.dot(wide, wide)  # without a temporary for the squares
