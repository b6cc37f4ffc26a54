"""The reference kernel over slices of large tensors, so that its temporaries stay in the processor's cache.

It runs if no kernel supports an eager call (`pt2mx.kernels.select`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pt2mx.kernels import reference
from pt2mx.kernels.reference import random_bits
from pt2mx.spec import MXSpec

__all__ = ["clip_gradient", "dequantize", "fake_quantize", "quantize", "split"]

#: values of a slice: at 4 bytes each, a temporary fits the second-level cache
_VALUES = 1 << 18


def quantize(x: Tensor, spec: MXSpec, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    def kernel(x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        return reference.quantize(x, spec, random)

    scale, codes = _by_slices(kernel, spec.axis, x, *_random(x, seed))
    return scale, codes


def dequantize(data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int) -> Tensor:
    def kernel(data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return (reference.dequantize(data, scale, spec, dtype, length),)

    return _by_slices(kernel, spec.axis, data, scale)[0]


def fake_quantize(x: Tensor, spec: MXSpec, seed: Tensor | None) -> Tensor:
    def kernel(x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        return (reference.fake_quantize(x, spec, random),)

    return _by_slices(kernel, spec.axis, x, *_random(x, seed))[0]


def clip_gradient(grad: Tensor, x: Tensor, spec: MXSpec) -> Tensor:
    return _by_slices(lambda grad, x: (reference.clip_gradient(grad, x, spec),), spec.axis, grad, x)[0]


def _random(x: Tensor, seed: Tensor | None) -> tuple[Tensor, ...]:
    return () if seed is None else (random_bits(seed, x.shape),)


def split(axis: int, *tensors: Tensor) -> tuple[int, list[tuple[Tensor, ...]]]:
    """Return the longest dimension other than `axis` (non-negative), and slices of the tensors along it.

    There is one slice of everything if the device is not the CPU, while compiling, or without such a dimension.
    """
    x = tensors[0]
    others = [d for d in range(x.dim()) if d != axis]
    if x.numel() <= _VALUES or not others or x.device.type != "cpu" or torch.compiler.is_compiling():
        return 0, [tensors]
    dim = max(others, key=lambda d: x.shape[d])
    step = max(1, _VALUES * x.shape[dim] // x.numel())
    return dim, list(zip(*(t.split(step, dim) for t in tensors), strict=True))


def _by_slices(kernel: Callable[..., tuple[Tensor, ...]], axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `kernel(*tensors)` in new contiguous memory, for a kernel that treats each line along `axis`
    independently."""
    dim, slices = split(axis, *tensors)
    parts = [kernel(*part) for part in slices]
    return tuple(torch.cat(outputs, dim) for outputs in zip(*parts, strict=True))
