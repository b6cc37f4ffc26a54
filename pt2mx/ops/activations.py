"""`activation_fake_quantize_mx`, `layer_norm_fake_quantize_mx`: activations and layer norms, quantized by the kernel
that computes them.

Lowered programs call them (`pt2mx.fx.passes.fuse_activation_quantize`), and Inductor keeps them calls.
`pt2mx.kernels.select` lists the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.arguments import ROWS, Activation
from pt2mx.ops.checks import HIGH_PRECISION, check_activation, check_quantization
from pt2mx.ops.operator import Format, Operator, T, operator
from pt2mx.ops.quantization import FakeQuantize
from pt2mx.spec import MXSpec

aten = torch.ops.aten
#: activation -> the gradient of x: of that of its result, and x
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda grad, x: grad,
    "gelu": lambda grad, x: aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    "silu": lambda grad, x: aten.silu_backward(grad, x),
    "relu": lambda grad, x: aten.threshold_backward(grad, x, 0),
}


class QuantizesRows(Operator[T]):
    """An operator that quantizes what it computes in blocks along the last dimension."""

    __slots__ = ()
    spec: MXSpec
    target_dtype: torch.dtype | None

    def fake_quantize(self, y: Tensor) -> Tensor:
        """Quantize what was computed."""
        return FakeQuantize(y.contiguous(), self.spec, None, "identity").call().to(self.result_dtype)


@operator("activation_fake_quantize_mx", 2, "x's shape, in `target_dtype`", saved=("x",))
class ActivationFakeQuantize(QuantizesRows[T]):
    """`fake_quantize_mx` of an activation of x along the last dimension, to the bit. The activation is rounded to x's
    dtype; its last bits are the device's own. The gradient is that of the activation.

    Example:
        >>> x = torch.tensor([-1.0, 1.1, 4.0])
        >>> torch.ops.pt2mx.activation_fake_quantize_mx(x, "relu", "fp4_e2m1", 32, "floor", "even")
        tensor([0., 1., 4.])
    """

    x: Annotated[T, "(..., K) float32, float16 or bfloat16 of any strides"]
    activation: Activation
    spec: Annotated[MXSpec, Format(ROWS)]
    target_dtype: Annotated[torch.dtype | None, "float32, float16 or bfloat16; None is that of x"] = None

    def check(self) -> tuple[MXSpec, torch.dtype]:
        check_activation(self.activation)
        return check_quantization(self.x, self.spec, self.target_dtype)

    def decompose(self) -> Tensor:
        y = ACTIVATIONS[self.activation](self.x)
        return self.fake_quantize(y.to(torch.promote_types(y.dtype, self.result_dtype)))

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        return {"x": BACKWARD[self.activation](grad.to(self.x.dtype), self.x)}


@operator(
    "layer_norm_fake_quantize_mx",
    2,
    {
        "normed": "x's shape, in the dtype of the sum: the norm before it is quantized",
        "quantized": "x's shape, in `target_dtype`",
    },
    saved=("x", "residual", "weight", "bias"),
)
class LayerNormFakeQuantize(QuantizesRows[T]):
    """The layer norm of x + residual along the last dimension, and `fake_quantize_mx` of it, to the bit. Sum and norm
    are rounded to the dtype of the sum; the last bits of the norm are the device's own.

    Example:
        >>> x = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
        >>> torch.ops.pt2mx.layer_norm_fake_quantize_mx(x, x, None, None, 0.0, "fp4_e2m1", 32, "floor", "even")
        (tensor([[ 0.6325, -0.6325,  1.2649, -1.2649]]), tensor([[ 0.7500, -0.7500,  1.5000, -1.5000]]))
    """

    x: Annotated[T, "(..., K) float32, float16 or bfloat16 of any strides"]
    residual: Annotated[T | None, "x's shape, float32, float16 or bfloat16, or None"]
    weight: Annotated[T | None, "(K,) in the dtype of the sum or float32, or None"]
    bias: Annotated[T | None, "(K,) in the dtype of the sum or float32, or None"]
    eps: Annotated[float, "what is added to the variance"]
    spec: Annotated[MXSpec, Format(ROWS)]
    target_dtype: Annotated[torch.dtype | None, "float32, float16 or bfloat16; None is that of the sum"] = None

    def summed(self) -> LayerNormFakeQuantize[T]:
        """Return the call with x and the residual in one dtype: added, where they have two, as they have under
        `torch.autocast`."""
        x, residual = self.x, self.residual
        if residual is None or residual.dtype == x.dtype or residual.shape != x.shape:
            return self
        if residual.dtype not in HIGH_PRECISION or x.dtype not in HIGH_PRECISION or residual.device != x.device:
            raise MXError(
                f"x {x.dtype} on {x.device} and the residual {residual.dtype} on {residual.device} must be float32, "
                "float16 or bfloat16 on one device"
            )
        return self.replace(x=x + residual, residual=None)

    def check(self) -> tuple[MXSpec, torch.dtype]:
        x, result = self.x, check_quantization(self.x, self.spec, self.target_dtype)
        if not x.dim():
            raise MXError("a layer norm is of rows: x has no dimension; pass x.view(1)")
        if self.residual is not None and self.residual.shape != x.shape:
            raise MXError(f"the residual {tuple(self.residual.shape)} must have the shape of x, {tuple(x.shape)}")
        for name in ("residual", "weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != x.device:
                raise MXError(f"{name} is on {tensor.device} and x on {x.device}: move one to the device of the other")
        check_norm_parameters(x, "the dtype of the sum", weight=self.weight, bias=self.bias)
        if self.weight is not None and self.bias is not None and self.weight.dtype != self.bias.dtype:
            raise MXError(f"weight of {self.weight.dtype} and bias of {self.bias.dtype} must be in one dtype: cast one")
        return result

    def kernel(self) -> tuple[Tensor, Tensor]:
        call = self.summed()
        return run_kernel(call, *call.check())

    def fake(self) -> tuple[Tensor, Tensor]:
        call = self.summed()
        _, dtype = call.check()
        return call.x.new_empty(call.x.shape), call.x.new_empty(call.x.shape, dtype=dtype)

    def decompose(self) -> tuple[Tensor, Tensor]:
        normed = layer_norm(self.x, self.residual, self.weight, self.bias, self.eps)
        return normed, ActivationFakeQuantize(normed, "none", self.spec, self.target_dtype).decompose()

    def backward(self, ctx: Any, grad_normed: Tensor, grad: Tensor) -> dict[str, Tensor | None]:
        """The gradient of the norm; quantization passes it through."""
        x, residual, weight, bias = self.x, self.residual, self.weight, self.bias
        summed = x if residual is None else x + residual
        _, mean, rstd = aten.native_layer_norm(summed, summed.shape[-1:], weight, bias, self.eps)
        grad = grad_normed + grad.to(grad_normed.dtype)
        mask = [True, weight is not None, bias is not None]
        of_sum, of_weight, of_bias = aten.native_layer_norm_backward(
            grad, summed, summed.shape[-1:], mean, rstd, weight, bias, mask
        )
        of_residual = None if residual is None else of_sum.to(residual.dtype)
        return {"x": of_sum.to(x.dtype), "residual": of_residual, "weight": of_weight, "bias": of_bias}


def layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of x + residual along the last dimension."""
    x = x if residual is None else x + residual
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def check_norm_parameters(x: Tensor, dtype_name: str, **parameters: Tensor | None) -> None:
    """Raise `MXError` for a weight or bias of a layer norm that does not fit the rows of x and its dtype."""
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if parameter.shape != x.shape[-1:]:
            raise MXError(f"{name} of shape {tuple(parameter.shape)} must be ({x.shape[-1]},), one of each column of x")
        if parameter.dtype not in (x.dtype, torch.float32):
            raise MXError(f"{name} of {parameter.dtype} must be in {dtype_name}, {x.dtype}, or float32: cast it")


activation_fake_quantize_mx = ActivationFakeQuantize.overload
layer_norm_fake_quantize_mx = LayerNormFakeQuantize.overload
