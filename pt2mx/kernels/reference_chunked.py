"""The reference kernel over slices of large tensors, so that its temporaries stay in the processor's cache.

It runs if no kernel supports an eager call (`pt2mx.kernels.select`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pt2mx.kernels import reference
from pt2mx.kernels.reference import random_bits
from pt2mx.spec import MXSpec

#: values of a slice: at 4 bytes each, a temporary fits the second-level cache
_VALUES = 1 << 18


def quantize(x: Tensor, spec: MXSpec, seed: Tensor | None, tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    def kernel(x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        return reference.quantize(x, spec, random, tensor_scale=tensor_scale)

    scale, codes = _by_slices(kernel, spec, x, *_random(x, seed))
    return scale, codes


def dequantize(
    data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int, tensor_scale: Tensor | None = None
) -> Tensor:
    def kernel(data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return (reference.dequantize(data, scale, spec, dtype, length, tensor_scale=tensor_scale),)

    return _by_slices(kernel, spec, data, scale)[0]


def fake_quantize(x: Tensor, spec: MXSpec, seed: Tensor | None, tensor_scale: Tensor | None = None) -> Tensor:
    def kernel(x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        return (reference.fake_quantize(x, spec, random, tensor_scale=tensor_scale),)

    return _by_slices(kernel, spec, x, *_random(x, seed))[0]


def clip_gradient(grad: Tensor, x: Tensor, spec: MXSpec, tensor_scale: Tensor | None = None) -> Tensor:
    def kernel(grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (reference.clip_gradient(grad, x, spec, tensor_scale=tensor_scale),)

    return _by_slices(kernel, spec, grad, x)[0]


def _random(x: Tensor, seed: Tensor | None) -> tuple[Tensor, ...]:
    return () if seed is None else (random_bits(seed, x.shape),)


def split(
    axis: int, *tensors: Tensor, rows: int = 1, row_axis: int | None = None
) -> tuple[int, list[tuple[Tensor, ...]]]:
    """Return the longest dimension other than `axis` (non-negative), and slices of the tensors along it.

    There is one slice of everything if the device is not the CPU, while compiling, or without such a dimension. Along
    `row_axis`, `rows` rows stay together, and a tensor that is shorter than the first has one for `rows` of its rows.
    """
    x = tensors[0]
    others = [d for d in range(x.dim()) if d != axis]
    if x.numel() <= _VALUES or not others or x.device.type != "cpu" or torch.compiler.is_compiling():
        return 0, [tensors]
    dim = max(others, key=lambda d: x.shape[d])
    step, group = max(1, _VALUES * x.shape[dim] // x.numel()), rows if dim == row_axis else 1
    groups = -(-step // group)
    steps = [groups * (group if t.shape[dim] == x.shape[dim] else 1) for t in tensors]
    return dim, list(zip(*(t.split(step, dim) for t, step in zip(tensors, steps, strict=True)), strict=True))


def _by_slices(kernel: Callable[..., tuple[Tensor, ...]], spec: MXSpec, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `kernel(*tensors)` in new contiguous memory, for a kernel that treats each line of blocks along the axis
    independently."""
    row_axis = spec.row_axis(tensors[0].dim()) if spec.block_rows > 1 else None
    dim, slices = split(spec.axis, *tensors, rows=spec.block_rows, row_axis=row_axis)
    parts = [kernel(*part) for part in slices]
    return tuple(torch.cat(outputs, dim) for outputs in zip(*parts, strict=True))
