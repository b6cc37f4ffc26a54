"""The scales of a weight's blocks in formats whose scales have a significand.

A weight that an algorithm rounded keeps them: unlike powers of two, they do not follow from the rounded values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.functional import tensor_scale_mx
from pt2mx.kernels import elements, float_scales, reference
from pt2mx.kernels.float_scales import FloatScale, code_of, code_range, multiplier_of, value_of
from pt2mx.spec import MXSpec

#: candidates for a block's scale, as multiples of the scale of the largest value: it saturates, or leaves room
_FACTORS = (1.0, 0.85, 0.92, 1.08)
#: the same, of the scale with which the block's largest value becomes the second largest number of the element
_SECOND_FACTORS = (1.0, 0.92)


@dataclass(frozen=True)
class BlockScales:
    """The scales of a weight.

    Args:
        spec: the format, with the axis of the weight counted from the front; blocks of one row.
        stored: (..., ceil(n / block_size), ...) as `quantize_mx` gives them.
        tensor_scale: () float32, of formats with one; otherwise None.
    """

    spec: MXSpec
    stored: Tensor
    tensor_scale: Tensor | None

    def to(self, device: torch.device) -> BlockScales:
        t = None if self.tensor_scale is None else self.tensor_scale.to(device)
        return BlockScales(self.spec, self.stored.to(device), t)

    def of_values(self, length: int) -> Tensor:
        """Return what multiplies the element of each of `length` values along the axis: (..., length, ...) float32."""
        scale = multiplier_of(self.stored, self.spec, self.tensor_scale)
        return reference.of_each_value(scale, self.spec.axis, self.spec.block_size, length)

    def round(self, values: Tensor) -> Tensor:
        """Return the nearest values of the format: (..., n, ...) float -> (..., n, ...) float32."""
        scale = self.of_values(values.shape[self.spec.axis])
        return elements.round_to_element(values.float() / scale, self.spec.element, self.spec.rounding) * scale

    def codes(self, values: Tensor) -> Tensor:
        """Return the codes of values, as `quantize_mx` packs them: (..., n, ...) float -> (..., bytes, ...) uint8."""
        return reference.codes_by_scales(values, self.spec, self.stored, self.tensor_scale)


@torch.no_grad()
def choose_scales(
    weight: Tensor, spec: MXSpec, importance: Tensor | None = None, amax: Tensor | None = None
) -> BlockScales:
    """Choose the scale of each block with the least squared error. The tensor scale follows from the largest magnitude,
    and leaves room for the largest block's scale to grow.

    Args:
        weight: (..., n, ...) float.
        spec: a format whose scales have a significand; its axis is the axis of the weight.
        importance: the weight of each squared error, in the shape of `weight`.
        amax: () float32, the largest magnitude of all weights that share the tensor scale; None: of this weight.
    """
    spec = spec.replace(axis=spec.axis % weight.dim())
    t = _tensor_scale(weight.float(), spec.replace(scale_mode="four_six"), amax)
    blocks = reference.to_blocks(weight.float(), spec)
    first = float_scales.scale_of(blocks, spec.replace(scale_mode="nearest"), t, elements)
    grid = spec.element
    second = grid.max_normal / (grid.max_normal - 2.0 ** (grid.emax - grid.mantissa_bits))
    factors = (*_FACTORS, *(second * factor for factor in _SECOND_FACTORS))
    weights = 1.0 if importance is None else reference.to_blocks(importance.float(), spec)
    codes, errors = [], []
    for factor in factors:
        codes.append(code_of(value_of(first.code, spec) * factor, spec).clamp(*code_range(spec)))
        candidate = FloatScale(codes[-1], first.finite, first.tensor_scale, spec, elements)
        rounded = elements.round_to_element(candidate.divide(blocks), grid, spec.rounding)
        error = (candidate.multiply(rounded) - blocks).square_().mul_(weights)
        errors.append(error.sum(spec.axis + 1, keepdim=True))
    best = torch.stack(errors).argmin(0, keepdim=True)  # of equal ones the first
    code = torch.stack(codes).gather(0, best).squeeze(0)
    chosen = FloatScale(code, first.finite, first.tensor_scale, spec, elements)
    return BlockScales(spec, reference.stored_scales(chosen, spec, weight.shape), t)


def nearest_scales(weight: Tensor, spec: MXSpec, tensor_scale: Tensor | None = None) -> BlockScales:
    """Return the scales that `quantize_mx` gives a weight, (..., n, ...) float.

    Args:
        tensor_scale: () float32, of formats with one; None: the scale of this weight.
    """
    spec = spec.replace(axis=spec.axis % weight.dim())
    if tensor_scale is None:
        tensor_scale = _tensor_scale(weight, spec, None)
    return BlockScales(spec, reference.scales(weight, spec, tensor_scale), tensor_scale)


def _tensor_scale(weight: Tensor, spec: MXSpec, amax: Tensor | None) -> Tensor | None:
    if not spec.has_tensor_scale:
        return None
    return tensor_scale_mx(weight if amax is None else amax, spec)
