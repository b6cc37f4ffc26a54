"""`quantize_elemwise_op` with a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pt2mx.microxcaling.elemwise_ops import quantize_elemwise_op
from pt2mx.microxcaling.specs import MxSpecs, apply_mx_specs, get_backwards_mx_specs, mx_assert_test


def quantize_bfloat(x: Tensor, mx_specs: Mapping[str, object] | None, round: str | None = None) -> Tensor:
    """Round as `quantize_elemwise_op` does, with a gradient, as `mx.quantize_bfloat` of microxcaling does.

    Args:
        x: (...) floating-point.
        mx_specs: those of `quantize_elemwise_op`; where `quantize_backprop` is true, the gradient is rounded too. None
            for x as it is.
        round: "nearest", "floor", "even" or "dither"; by default that of the specs.

    Returns:
        (...) in the dtype of x.

    Raises:
        MXError: as `quantize_elemwise_op`.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> x = torch.tensor([1.01, 1 / 3], requires_grad=True)
        >>> y = mx.quantize_bfloat(x, {"bfloat": 12})
        >>> torch.autograd.grad(y.sum() / 3, x)
        (tensor([0.3438, 0.3438]),)
    """
    mx_assert_test(mx_specs)
    return x if mx_specs is None else _Rounded.apply(x, apply_mx_specs(mx_specs), round)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, specs: MxSpecs, round: str | None) -> Tensor:
        ctx.specs, ctx.round = specs, round
        return quantize_elemwise_op(x, specs, round)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return quantize_elemwise_op(grad, get_backwards_mx_specs(ctx.specs), ctx.round), None, None
