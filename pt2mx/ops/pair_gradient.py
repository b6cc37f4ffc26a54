"""The gradient of `quantize_mx` followed by `dequantize_mx`: straight through, as that of `fake_quantize_mx`.

Codes are integers, through which autograd takes no gradient. So the codes of a tensor that requires one remember the
tensor, and what dequantizes them passes its gradient on to it. Without this the gradient of a converted model would
lack every branch that is quantized, silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError

#: attribute of codes: the tensor that was quantized, where it requires a gradient
_SOURCE = "_mx_source"


def remember_source(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """`setup_context` of `quantize_mx`, which autograd calls where x requires a gradient."""
    setattr(output[1], _SOURCE, inputs[0])


def no_gradient(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    """`backward` of `quantize_mx`: its outputs are integers."""
    return (None,) * 7


class _StraightThrough(torch.autograd.Function):
    """values, source -> values; the gradient of the values is that of the source."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = source.shape, source.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.reshape(ctx.shape).to(ctx.dtype)


def dequantize_straight_through(data: Tensor, *arguments: object) -> Tensor:
    """`dequantize_mx` for autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        values = torch.ops.pt2mx.dequantize_mx.default(data, *arguments)
    source = getattr(data, _SOURCE, None)
    if source is None or not torch.is_grad_enabled():
        return values
    if values.numel() != source.numel():
        raise MXError(
            f"dequantize_mx gives {values.numel()} values of codes that hold {source.numel()}, and cannot pass their "
            "gradient on: pass the length that was quantized"
        )
    return _StraightThrough.apply(values, source)
