"""Nested rounding: values of a wide format ("anchor") that quantize to given values of a narrower one.

Matryoshka Quantization (Nair et al., arXiv:2502.06786) nests the codes of integers in this way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.functional import fake_quantize_mx, quantize_mx
from pt2mx.kernels import elements, reference
from pt2mx.spec import MXSpec


def cell_bounds(rounded: Tensor, spec: MXSpec, weight: Tensor, anchor: MXSpec) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of the anchor that rounds to each value of a narrower format.

    Args:
        rounded: (..., n, ...) values of the narrow format, on its grid.
        spec: the narrow format, with E8M0 scales and blocks of one row.
        weight: (..., n, ...) the weight, from which the scales of the anchor follow.
        anchor: the wide format, with blocks of the same size along the same axis.

    Returns:
        Two tensors, (..., n, ...) float32: both are the rounded value where the anchor has no value that rounds to it.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.algorithms import cell_bounds
        >>> rounded, weight = torch.tensor([1.5, 0.5]), torch.tensor([1.4, 0.4])
        >>> low, high = cell_bounds(rounded, pt2mx.MXSpec("int3"), weight, pt2mx.MXSpec("int8"))
        >>> low, high
        (tensor([1.2656, 0.2656]), tensor([1.9844, 0.7344]))
        >>> pt2mx.fake_quantize_mx(low, "int3{32}"), pt2mx.fake_quantize_mx(high, "int3{32}")
        (tensor([1.5000, 0.5000]), tensor([1.5000, 0.5000]))
    """
    rounded = rounded.float()
    scale, unit = _scale_of(rounded, spec), _scale_of(weight, anchor)
    grid, fine = _grid(spec.element, rounded), _grid(anchor.element, rounded)
    middles, ends = (grid[1:] + grid[:-1]) / 2, torch.full((1,), torch.inf, device=grid.device)
    edges = torch.cat((-ends, middles, ends))
    code = torch.searchsorted(grid, rounded / scale)
    below, above = edges[code] * scale / unit, edges[code + 1] * scale / unit
    first = torch.searchsorted(fine, below, right=True).clamp(max=len(fine) - 1)
    last = (torch.searchsorted(fine, above) - 1).clamp(min=0)
    return tuple(torch.where(first <= last, fine[index] * unit, rounded) for index in (first, last))  # type: ignore


def keep_slices(values: Tensor, rounded: Tensor, spec: MXSpec, anchor: MXSpec) -> Tensor:
    """Return values of the anchor, but the rounded ones in the blocks that would not quantize to them.

    Args:
        values: (..., n, ...) values near those within `cell_bounds`.
        rounded, spec, anchor: as in `cell_bounds`.

    Returns:
        (..., n, ...) values of the anchor, in the dtype of `values`.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.algorithms import keep_slices
        >>> int3, int8 = pt2mx.MXSpec("int3", 2), pt2mx.MXSpec("int8", 2)
        >>> keep_slices(torch.tensor([1.1, 0.6, 1.1, 0.8]), torch.tensor([1.0, 0.5, 1.0, 0.5]), int3, int8)
        tensor([1.0938, 0.5938, 1.0000, 0.5000])
    """
    values = fake_quantize_mx(values, anchor)
    differs = fake_quantize_mx(values, spec) != rounded
    changed = reference.to_blocks(differs, spec).any(spec.axis + 1)
    whole = reference.of_each_value(changed, spec.axis, spec.block_size, values.shape[spec.axis])
    return torch.where(whole, fake_quantize_mx(rounded.to(values.dtype), anchor), values)


def _scale_of(values: Tensor, spec: MXSpec) -> Tensor:
    """Return the scale of each value, (..., n, ...) float32."""
    scales, _ = quantize_mx(values, spec)
    each = reference.of_each_value(scales, spec.axis, spec.block_size, values.shape[spec.axis])
    return torch.exp2(each.float() - elements.BIAS)


def _grid(element: ElementFormat, like: Tensor) -> Tensor:
    """Return the finite values of an element, ascending."""
    values = torch.tensor(elements.values_of_codes(element), device=like.device)
    return values[values.isfinite() & (values.abs() <= element.max_normal)].unique()
