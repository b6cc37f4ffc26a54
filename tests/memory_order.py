"""Tensors in every order of dimensions in memory, and their results in all operators."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pt2mx import ops

#: elements with one, two and four codes in a packed group
NAMES = ("fp8_e4m3", "fp4_e2m1", "fp6_e2m3")
BLOCK = 2


def laid_out(shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return random numbers with that order of dimensions in memory."""
    return torch.empty_permuted(shape, order).copy_(torch.randn(shape))


def views() -> Iterator[Tensor]:
    """Transposed, expanded, sliced, overlapping and empty tensors, 0-d and 1-d ones among them."""
    x = torch.randn(3, 6, 4, 5)
    yield from (torch.randn(()), torch.randn(7)[::2], torch.randn(1).expand(5), x[0, 0, 0, 0], x[:, 1:2, :, 0])
    yield from (x.transpose(1, 3), x[:, ::2], x[:, 1:4].permute(0, 2, 3, 1), x[..., 1:], x[1:2, :, 1], x[:, :, 2:3])
    yield from (x.permute(0, 2, 3, 1)[:, 1:], x[:, :1].expand(3, 6, 4, 5), x[:1].mT.expand(3, 6, 5, 4))
    yield from (x.unfold(1, 3, 1), x.as_strided((3, 4, 5), (1, 2, 3)), x.as_strided((4, 4), (0, 2)), x[..., :1].mT)
    yield from (x[:0], x[:, :0], x[:, :0].mT, x[:0].permute(3, 0, 1, 2), torch.empty(0), torch.empty(0, 1, 0))
    channels_last = x.contiguous(memory_format=torch.channels_last)
    yield from (
        channels_last,
        channels_last[:, 1:3],
        channels_last[..., 0],
        channels_last[:1],
        channels_last[:, :, :1, :1],
    )


def all_operators(x: Tensor, name: str, axis: int, rounding: str = "even") -> tuple[Tensor, ...]:
    """(fake_quantize, clip_gradient, scale, data, dequantize) of x."""
    scale, data = ops.quantize_mx(x, name, BLOCK, axis, "floor", rounding, 3)
    length = x.shape[axis] if x.dim() else 1
    return (
        ops.fake_quantize_mx(x, name, BLOCK, axis, "floor", rounding, 3, "identity"),
        ops.clip_gradient_mx(x, x, name, BLOCK, axis, "floor", "even"),
        scale,
        data,
        ops.dequantize_mx(data, scale, name, BLOCK, x.dtype, axis, length),
    )
