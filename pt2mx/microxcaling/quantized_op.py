"""Define the base of layers and functions: a matmul or convolution that quantizes its operands, forward and backward.

An operator computes three matmuls: the forward one and one for each gradient. It rounds every tensor to the floats of
the specs (`quantize_elemwise_op`), quantizes both operands of each matmul along the dimension that the matmul reduces,
and rounds the result. A table (`Role`) names the format and rounding of each operand; `pt2mx.products` has the matmuls
of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pt2mx.microxcaling.elemwise_ops import quantize_elemwise_op
from pt2mx.microxcaling.mx_ops import quantize_mx_op
from pt2mx.microxcaling.specs import MxSpecs, apply_mx_specs, get_backwards_mx_specs
from pt2mx.products import Products


@dataclass(frozen=True)
class Role:
    """The quantization of one operand of one matmul: keys of the specs.

    Without a key for the rounding, the rounding is "nearest".
    """

    format: str
    round: str | None = None

    def quantize(self, x: Tensor, specs: MxSpecs, axis: int) -> Tensor:
        rounding = "nearest" if self.round is None else specs[self.round]
        return quantize_mx_op(x, specs, specs[self.format], axes=axis, round=rounding)


@dataclass(frozen=True)
class QuantizedOp:
    """A matmul or convolution of two operands.

    Args:
        forward: (first, second, bias or None, **call) -> the result.
        roles, axes: of the operands in `forward`, and the dimensions of their blocks.
        products: the gradients of the operands.
        product_roles: for each product the roles of the gradient and of the other operand.
        is_weight: true if the second operand is a weight. It decides the keys for the rounding of the operand and of
            its gradient.
        adds_bias: true if the bias is added after the result was rounded; else `forward` adds it to the channels, the
            second dimension of the result.
    """

    forward: Callable[..., Tensor]
    roles: tuple[Role, Role]
    axes: tuple[int, int]
    products: Products
    product_roles: tuple[tuple[Role, Role], tuple[Role, Role]]
    is_weight: bool
    adds_bias: bool = True

    @torch.compiler.disable
    def __call__(
        self, first: Tensor, second: Tensor, bias: Tensor | None, specs: MxSpecs, call: Mapping[str, Any] | None = None
    ) -> Tensor:
        """`specs`: complete, as `apply_mx_specs` returns them; `call`: further arguments of `forward`. torch.compile
        runs it in eager mode."""
        return _Function.apply(first, second, bias, self, specs, call or {})


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor, bias: Tensor | None, op: QuantizedOp, specs: MxSpecs, call: dict
    ) -> Tensor:
        rounded = (_round(first, specs, "output"), _round(second, specs, "weight" if op.is_weight else "output"))
        ctx.save_for_backward(*(rounded if specs["quantize_backprop"] else (first, second)))
        ctx.op, ctx.specs, ctx.call = op, get_backwards_mx_specs(specs), call
        ctx.bias_shape = None if bias is None else bias.shape
        bias = None if bias is None else _round(bias, specs, "weight")
        operands = [r.quantize(x, specs, axis) for r, x, axis in zip(op.roles, rounded, op.axes, strict=True)]
        if bias is None or not op.adds_bias:
            return _round(op.forward(*operands, bias, **call), specs, "output")
        return _round(_round(op.forward(*operands, None, **call), specs, "output") + bias, specs, "output")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, op, specs = ctx.saved_tensors, ctx.op, ctx.specs
        grad = _round(grad, specs, "grad_input")
        grads: list[Tensor | None] = [None] * 6
        for i, (product, roles) in enumerate(zip(op.products, op.product_roles, strict=True)):
            if ctx.needs_input_grad[i]:
                factors = zip(roles, (grad, saved[1 - i]), product.axes, strict=True)
                operands = [role.quantize(x, specs, axis) for role, x, axis in factors]
                gradient = product.compute(*operands, saved[i].shape, **ctx.call)
                grads[i] = _round(gradient, specs, "grad_weight" if i and op.is_weight else "grad_input")
        if ctx.bias_shape is not None and ctx.needs_input_grad[2]:
            shape = ctx.bias_shape if op.adds_bias else (*ctx.bias_shape, *(1,) * (grad.dim() - 2))
            grads[2] = _round(grad.sum_to_size(shape).reshape(ctx.bias_shape), specs, "grad_weight")
        return tuple(grads)


def _round(x: Tensor, specs: MxSpecs, what: str) -> Tensor:
    return quantize_elemwise_op(x, specs, specs[f"round_{what}"])


class MxLayer:
    """A base class in front of one of torch's layers: the layer with `mx_specs`. With None it computes as torch's
    layer.

    `name` is a label that changes nothing.
    """

    def __init__(
        self, *args: Any, mx_specs: Mapping[str, object] | None = None, name: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.name = name
        self.apply_mx_specs(mx_specs)

    def apply_mx_specs(self, mx_specs: Mapping[str, object] | None) -> None:
        """Take other specs."""
        self.mx_none = mx_specs is None
        self.mx_specs = apply_mx_specs(mx_specs)
