"""The definition of rotation within blocks, in plain torch operations that compilers can trace: flip some signs, then
apply the fast Walsh-Hadamard transform.

The sums are in float32, in one order, and the only multiplication is the last step. So the bits are the same on every
device, eager or compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, size: int, axis: int = -1) -> Tensor:
    """x: (..., n, ...), `size` a power of two that divides n -> x, with the signs of `signs`, times the Hadamard matrix
    over the square root of `size`, block by block along the axis, in x's dtype and contiguous."""
    y = _transformed(_signed(x.float().movedim(axis, -1), size), size)
    return y.movedim(-1, axis).to(x.dtype).contiguous()


def rotate_back(y: Tensor, size: int, axis: int = -1) -> Tensor:
    """Invert `rotate`; this is also the gradient of `rotate`."""
    return _signed(_transformed(y.float().movedim(axis, -1), size), size).movedim(-1, axis).to(y.dtype)


def signs(size: int, device: torch.device) -> Tensor:
    """(size,) float32: -1 where b0 b1 + b2 b3 + ... is odd, with the bits b of the index, else 1.

    This is a bent function (Rothaus, "On bent functions", 1976) or close to one: its transform is flat. Without the
    signs, the transform would turn the mean of a block, which is large after a ReLU, into one large value.
    """
    index = torch.arange(size, device=device)
    odd = index & (index >> 1) & 0x5555
    for shift in (8, 4, 2):
        odd = odd ^ (odd >> shift)
    return 1.0 - 2.0 * (odd & 1)


def _signed(y: Tensor, size: int) -> Tensor:
    """y: (..., n), the axis last -> y with the signs of `signs` in each block."""
    return y * signs(size, y.device).repeat(y.shape[-1] // size)


def _transformed(y: Tensor, size: int) -> Tensor:
    """y: (..., n) float32, the axis last -> its transform, which is its own inverse and transpose."""
    shape, half = y.shape, 1
    while half < size:
        first, second = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).view(shape)
        half *= 2
    return y * size**-0.5
