"""Merge the rows of a parameter, such as the weights of all experts, that a checkpoint holds in parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.float_scales import scale_values, steps_of
from pt2mx.pt2e.models.weight_formats import PackedTensors, with_float_scales
from pt2mx.spec import MXSpec


def rows_of_scales(name: str, spec: MXSpec, rows: Tensor) -> Tensor:
    """Return the rows of scales that belong to rows of codes.

    Args:
        name: the tensor that holds the rows, for the error.
        spec: the format.
        rows: indices of rows of codes; rows of a block follow each other.

    Raises:
        MXError: where the rows are no whole blocks.
    """
    height = spec.block_rows
    if height == 1:
        return rows
    first = rows[::height]
    whole = first.repeat_interleave(height)[: rows.numel()] + torch.arange(rows.numel()) % height
    if bool((first % height).any()) or not rows.equal(whole):
        raise MXError(f"the rows of {name} are no whole blocks of {height} rows of its parameter")
    return first // height


def merge(name: str, shape: torch.Size, parts: Iterable[tuple[PackedTensors, Tensor]]) -> PackedTensors:
    """Merge the rows of a parameter, whose codes a checkpoint holds in parts.

    Matrices with different tensor scales keep them. Parts of one matrix with different tensor scales get float32
    scales, the products that kernels compute: the values are equal.

    Args:
        name: the parameter, for errors.
        shape: its shape without the last dimension.
        parts: the codes of each part with its rows of the parameter, which counts as rows of K; each is read once.

    Returns:
        data (*shape, bytes of K), and the scales.

    Raises:
        MXError: where parts have several formats.
    """
    data, scales = None, []
    for part, rows in parts:
        data = torch.empty(shape.numel(), part.data.shape[-1], dtype=torch.uint8) if data is None else data
        data[rows] = part.data
        scales.append((part._replace(data=part.data[:0]), rows))
    first = scales[0][0]
    if data is None or any(part.spec != first.spec for part, _ in scales):
        raise MXError(f"{name} has parts in {first.spec} and in others: a parameter has one format")
    height = first.spec.block_rows
    if height > 1 and any(rows.numel() % height for _, rows in scales):
        scales = [(_per_row(part, rows.numel()), rows) for part, rows in scales]
        first, height = scales[0][0], 1
    tensor_scale = _of_matrices(shape, scales)
    if tensor_scale is None and first.tensor_scale is not None:
        scales = [(_folded(part), rows) for part, rows in scales]
        first = scales[0][0]
    scale = torch.empty(shape.numel() // height, first.scale.shape[-1], dtype=first.scale.dtype)
    for part, rows in scales:
        scale[rows_of_scales(name, part.spec, rows)] = part.scale
    scale = scale.view(*shape[:-1], shape[-1] // height, scale.shape[-1])
    return first._replace(data=data.view(*shape, -1), scale=scale, tensor_scale=tensor_scale)


def _of_matrices(shape: torch.Size, parts: list[tuple[PackedTensors, Tensor]]) -> Tensor | None:
    """Return the tensor scale of each matrix, or () if they are equal; None where a matrix has several, or none."""
    of_rows = torch.full((shape.numel(),), float("nan"))
    for part, rows in parts:
        if part.tensor_scale is not None:
            of_rows[rows] = part.tensor_scale
    first = of_rows.view(-1, shape[-1])[:, :1]
    if not of_rows.view(-1, shape[-1]).eq(first).all():
        return None
    if bool((first == first[0]).all()):
        return first[0, 0]
    return first[:, 0] if len(shape) == 2 else None


def _per_row(packed: PackedTensors, rows: int) -> PackedTensors:
    """Return the same codes with scales of each row, for blocks that do not fit the rows of a merged parameter."""
    scale = packed.scale.repeat_interleave(packed.spec.block_rows, -2)[..., :rows, :]
    return packed._replace(scale=scale, spec=packed.spec.replace(block_rows=1))


def _folded(packed: PackedTensors) -> PackedTensors:
    """Return the same codes with the tensor scale in their scales."""
    scale = scale_values(packed.scale, packed.spec)
    return with_float_scales(packed, steps_of(packed.spec).apply(scale, packed.stated_tensor_scale))
