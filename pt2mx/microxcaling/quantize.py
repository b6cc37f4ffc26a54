"""`quantize_elemwise_op` with a gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pt2mx.microxcaling.elemwise_ops import quantize_elemwise_op
from pt2mx.microxcaling.specs import MxSpecs, apply_mx_specs, get_backwards_mx_specs, mx_assert_test


def quantize_bfloat(x: Tensor, mx_specs: Mapping[str, object] | None, round: str | None = None) -> Tensor:
    """x as `quantize_elemwise_op` rounds it; the gradient is rounded in the same way, unless `quantize_backprop` is
    false.

    Raises:
        MXError: as `quantize_elemwise_op`.
    """
    mx_assert_test(mx_specs)
    return x if mx_specs is None else _Rounded.apply(x, apply_mx_specs(mx_specs), round)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, specs: MxSpecs, round: str | None) -> Tensor:
        ctx.specs, ctx.round = specs, round
        return quantize_elemwise_op(x, specs, round)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:
        return quantize_elemwise_op(grad, get_backwards_mx_specs(ctx.specs), ctx.round), None, None
