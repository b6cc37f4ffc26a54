"""`torch.ops.pt2mx.hadamard`: values rotated within blocks, so that outliers are shared out among their neighbours.

Source: the fast Walsh-Hadamard transform; QuaRot (Ashkboos et al., arXiv:2404.00456) rotates whole rows. A product
stays what it is if both of its factors are rotated along the dimension that it reduces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.ops.checks import HIGH_PRECISION


def rotate(x: Tensor, size: int, axis: int = -1) -> Tensor:
    """x: (..., n, ...), `size` a power of two that divides n -> x, with the signs of `signs`, times the Hadamard matrix
    over the square root of `size`, block by block along the axis, in x's dtype.

    Sums are made in float32, in one order and without a product before the last step: they have the same bits on every
    device, eager or compiled.
    """
    return _transformed(_signed(x.float().movedim(axis, -1), size), size).movedim(-1, axis).to(x.dtype)


def signs(size: int, device: torch.device) -> Tensor:
    """(size,) float32: -1 where the form b0 b1 + b2 b3 + ... of an index's bits is odd, else 1.

    A bent function (Rothaus, "On bent functions", 1976), or next to one: its transform is flat. Without the signs the
    mean of a block, which the outputs of a ReLU have, would become one large value.
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


def _hadamard(x: Tensor, size: int, axis: int = -1) -> Tensor:
    _check(x, size, axis)
    return rotate(x, size, axis).contiguous()


def _hadamard_fake(x: Tensor, size: int, axis: int = -1) -> Tensor:
    _check(x, size, axis)
    return x.new_empty(x.shape)


def _check(x: Tensor, size: int, axis: int) -> None:
    if x.dtype not in HIGH_PRECISION:
        raise MXError(f"hadamard takes float32, float16 or bfloat16, not {x.dtype}: cast x")
    if not -x.dim() <= axis < x.dim():
        raise MXError(f"axis={axis} is out of range for x of shape {tuple(x.shape)}")
    if size < 1 or size & (size - 1) or x.shape[axis] % size:
        raise MXError(
            f"blocks of {size} do not rotate {x.shape[axis]} values: the size must be a power of two that divides them"
        )


def _save_arguments(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.size, ctx.axis = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y = _signed(_transformed(grad.float().movedim(ctx.axis, -1), ctx.size), ctx.size)
    return y.movedim(-1, ctx.axis).to(grad.dtype), None, None


torch.library.define(
    "pt2mx::hadamard", "(Tensor x, int size, int axis=-1) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
torch.library.impl("pt2mx::hadamard", "CompositeExplicitAutograd", _hadamard)
torch.library.register_fake("pt2mx::hadamard", _hadamard_fake)
torch.library.register_autograd("pt2mx::hadamard", _backward, setup_context=_save_arguments)

hadamard = torch.ops.pt2mx.hadamard.default
