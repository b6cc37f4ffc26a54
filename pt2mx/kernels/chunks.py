"""Large tensors in slices, so that the temporaries of plain torch operations stay in the processor's cache."""

from collections.abc import Callable

import torch
from torch import Tensor

#: values of a slice: at 4 bytes each, a temporary fits the second-level cache
_VALUES = 1 << 18


def split(axis: int, *tensors: Tensor) -> tuple[int, list[tuple[Tensor, ...]]]:
    """The longest dimension but `axis` (non-negative), and slices along it of tensors that agree on it.

    There is one slice, of everything, on another device than the CPU, while compiling, and without such a dimension.
    """
    x = tensors[0]
    others = [d for d in range(x.dim()) if d != axis]
    if x.numel() <= _VALUES or not others or x.device.type != "cpu" or torch.compiler.is_compiling():
        return 0, [tensors]
    dim = max(others, key=lambda d: x.shape[d])
    step = max(1, _VALUES * x.shape[dim] // x.numel())
    return dim, list(zip(*(t.split(step, dim) for t in tensors), strict=True))


def by_chunks(kernel: Callable[..., tuple[Tensor, ...]], axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`kernel(*tensors)` with contiguous outputs in memory of their own, for a kernel that works on each line along
    `axis` by itself."""
    dim, slices = split(axis, *tensors)
    parts = [kernel(*part) for part in slices]
    return tuple(torch.cat(outputs, dim) for outputs in zip(*parts, strict=True))
