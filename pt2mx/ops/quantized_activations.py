"""`torch.ops.pt2mx.activation_fake_quantize_mx`, `layer_norm_fake_quantize_mx`: `fake_quantize_mx` of an activation or
a layer norm, by the kernel that computes it.

Lowered programs call them (`pt2mx.fx.passes.fuse_activation_quantize`), and Inductor keeps them calls.
`pt2mx.kernels.quantized_activations` defines them on every device; `pt2mx.kernels.select` lists the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.kernels.select import run_kernel
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.checks import HIGH_PRECISION, check_input
from pt2mx.spec import MXSpec

aten = torch.ops.aten


def _activation(x: Tensor, activation: str, *modes: Any) -> Tensor:
    spec, dtype = check_quantization(x, *modes)
    check_activation(activation)
    return run_kernel("activation_fake_quantize_mx", x, activation, spec, dtype)


def _activation_fake(x: Tensor, activation: str, *modes: Any) -> Tensor:
    _, dtype = check_quantization(x, *modes)
    check_activation(activation)
    return x.new_empty(x.shape, dtype=dtype)


def _layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *modes: Any
) -> tuple[Tensor, Tensor]:
    x, residual = _in_one_dtype(x, residual)
    spec, dtype = _check_layer_norm(x, residual, weight, bias, *modes)
    return run_kernel("layer_norm_fake_quantize_mx", x, residual, weight, bias, eps, spec, dtype)


def _layer_norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *modes: Any
) -> tuple[Tensor, Tensor]:
    x, residual = _in_one_dtype(x, residual)
    _, dtype = _check_layer_norm(x, residual, weight, bias, *modes)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype)


def _in_one_dtype(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and what is added to it, in the dtype of their sum: under `torch.autocast` a product has another one."""
    if residual is None or residual.dtype == x.dtype or residual.shape != x.shape:
        return x, residual
    if residual.dtype not in HIGH_PRECISION or x.dtype not in HIGH_PRECISION or residual.device != x.device:
        raise MXError(
            f"x {x.dtype} on {x.device} and the residual {residual.dtype} on {residual.device} must be float32, "
            "float16 or bfloat16 on one device"
        )
    return x + residual, None


def check_quantization(
    x: Tensor,
    elem: str,
    block_size: int,
    scale_mode: str = "floor",
    rounding: str = "even",
    target_dtype: torch.dtype | None = None,
) -> tuple[MXSpec, torch.dtype]:
    """Return the spec and the dtype of quantized values of x; MXError for what the operators do not take."""
    spec = check_input(x, elem, block_size, -1, scale_mode, rounding)
    if ROUNDINGS[rounding].random:
        raise MXError(f"values are not rounded {rounding!r} where they are computed: use fake_quantize_mx of them")
    dtype = target_dtype or x.dtype
    if dtype not in HIGH_PRECISION:
        raise MXError(f"target_dtype={dtype} must be float32, float16 or bfloat16, or None for that of x")
    return spec, dtype


def check_activation(activation: str) -> None:
    """Raise MXError for what is no activation."""
    if activation not in ACTIVATIONS:
        raise MXError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")


def _check_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *modes: Any
) -> tuple[MXSpec, torch.dtype]:
    spec, dtype = check_quantization(x, *modes)
    if not x.dim():
        raise MXError("a layer norm is of rows: x has no dimension; pass x.view(1)")
    if residual is not None and residual.shape != x.shape:
        raise MXError(f"the residual {tuple(residual.shape)} must have the shape of x, {tuple(x.shape)}")
    for name, tensor in (("residual", residual), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise MXError(f"{name} is on {tensor.device} and x on {x.device}: move one to the device of the other")
    for name, of_norm in (("weight", weight), ("bias", bias)):
        if of_norm is None:
            continue
        if of_norm.shape != x.shape[-1:]:
            raise MXError(f"{name} of shape {tuple(of_norm.shape)} must be ({x.shape[-1]},), one of each column of x")
        if of_norm.dtype not in (x.dtype, torch.float32):
            raise MXError(f"{name} of {of_norm.dtype} must be in the dtype of the sum, {x.dtype}, or float32: cast it")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise MXError(f"weight of {weight.dtype} and bias of {bias.dtype} must be in one dtype: cast one")
    return spec, dtype


# ---- gradients: those of the activation and of the norm; quantization passes them through ----


def _save_activation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.activation = inputs[1]


def _activation_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return BACKWARD[ctx.activation](grad.to(x.dtype), x), *(None,) * 6


#: activation -> the gradient of x: of that of its result, and x
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda grad, x: grad,
    "gelu": lambda grad, x: aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    "silu": lambda grad, x: aten.silu_backward(grad, x),
    "relu": lambda grad, x: aten.threshold_backward(grad, x, 0),
}


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.eps = inputs[4]


def _norm_backward(ctx: Any, grad_normed: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, residual, weight, bias = ctx.saved_tensors
    summed = x if residual is None else x + residual
    _, mean, rstd = aten.native_layer_norm(summed, summed.shape[-1:], weight, bias, ctx.eps)
    grad = grad_normed + grad.to(grad_normed.dtype)
    mask = [True, weight is not None, bias is not None]
    of_x, *of_norm = aten.native_layer_norm_backward(grad, summed, summed.shape[-1:], mean, rstd, weight, bias, mask)
    return of_x.to(x.dtype), None if residual is None else of_x.to(residual.dtype), *of_norm, *(None,) * 6


_MODES = (
    'str elem_dtype_name, int block_size, str scale_mode="floor", str rounding="even", ScalarType? target_dtype=None'
)

#: operator -> its schema, kernel, fake kernel, and those of its gradient
_OPERATORS: dict[str, tuple[str, Any, Any, Any, Any]] = {
    "activation_fake_quantize_mx": (
        f"(Tensor x, str activation, {_MODES}) -> Tensor",
        *(_activation, _activation_fake, _activation_backward, _save_activation),
    ),
    "layer_norm_fake_quantize_mx": (
        f"(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, {_MODES}) -> "
        "(Tensor normed, Tensor quantized)",
        *(_layer_norm, _layer_norm_fake, _norm_backward, _save_norm),
    ),
}

for _name, (_schema, _kernel, _fake, _backward, _save) in _OPERATORS.items():
    torch.library.define(f"pt2mx::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    torch.library.impl(f"pt2mx::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"pt2mx::{_name}", _fake)
    torch.library.register_autograd(f"pt2mx::{_name}", _backward, setup_context=_save)

activation_fake_quantize_mx = torch.ops.pt2mx.activation_fake_quantize_mx.default
layer_norm_fake_quantize_mx = torch.ops.pt2mx.layer_norm_fake_quantize_mx.default
