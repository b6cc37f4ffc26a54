"""`torch.ops.pt2mx.linear_fake_quantize_mx`: `activation_fake_quantize_mx` of `linear_mx`, by one kernel.

Lowered programs for the CPU call it (`pt2mx.fx.passes.fuse_quantize_epilogue`), and Inductor keeps it a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.autocast import register_autocast
from pt2mx.ops.linear import LinearMX, linear_mx
from pt2mx.ops.quantized_activations import (
    BACKWARD,
    activation_fake_quantize_mx,
    check_activation,
    check_quantization,
)
from pt2mx.spec import MXSpec


def _linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *modes: Any) -> Tensor:
    weight, product_dtype, activation, quantization, dtype = _check(x, data, scale, bias, *modes)
    args = data, scale, bias, weight, product_dtype, activation, quantization, dtype
    result = run_kernel("linear_fake_quantize_mx", x, *args)
    if result is not None:
        return result
    elem, block_size, _, activation, *rest = modes
    product = linear_mx(x, data, scale, bias, elem, block_size, 0, product_dtype)
    return activation_fake_quantize_mx(product, activation, *rest)


def _linear_fake(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *modes: Any) -> Tensor:
    *_, dtype = _check(x, data, scale, bias, *modes)
    return x.new_empty((*x.shape[:-1], data.shape[0]), dtype=dtype)


def _check(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    elem: str,
    block_size: int,
    product_dtype: torch.dtype | None,
    activation: str,
    out_elem: str,
    out_block_size: int,
    scale_mode: str = "floor",
    rounding: str = "even",
    target_dtype: torch.dtype | None = None,
) -> tuple[MXSpec, torch.dtype, str, MXSpec, torch.dtype]:
    weight, product_dtype = LinearMX(x, data, scale, bias, elem, block_size, 0, product_dtype).check()
    check_activation(activation)
    target_dtype = target_dtype or product_dtype
    try:
        quantization, dtype = check_quantization(x, out_elem, out_block_size, scale_mode, rounding, target_dtype)
    except MXError as error:
        raise MXError(f"the result of the product: {error}") from None
    return weight, product_dtype, activation, quantization, dtype


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, data, scale, bias, ctx.elem, ctx.block_size, ctx.product_dtype, ctx.activation, *_ = inputs
    ctx.save_for_backward(x, data, scale, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, data, scale, bias = ctx.saved_tensors
    with torch.autocast(x.device.type, enabled=False):  # as the product was cast already
        product = linear_mx(x, data, scale, bias, ctx.elem, ctx.block_size, 0, ctx.product_dtype)
    grad = BACKWARD[ctx.activation](grad.to(product.dtype), product)
    weight = ops.dequantize_mx(data, scale, ctx.elem, ctx.block_size, grad.dtype, -1, x.shape[-1])
    of_bias = None if bias is None else grad.flatten(0, -2).sum(0)
    return (grad @ weight).to(x.dtype), None, None, of_bias, *(None,) * 9


torch.library.define(
    "pt2mx::linear_fake_quantize_mx",
    "(Tensor x, Tensor weight_data, Tensor weight_scale, Tensor? bias, str elem_dtype_name, int block_size, "
    "ScalarType? product_dtype, str activation, str out_elem_dtype_name, int out_block_size, "
    'str scale_mode="floor", str rounding="even", ScalarType? target_dtype=None) -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
torch.library.impl("pt2mx::linear_fake_quantize_mx", "CompositeExplicitAutograd", _linear)
torch.library.register_fake("pt2mx::linear_fake_quantize_mx", _linear_fake)
torch.library.register_autograd("pt2mx::linear_fake_quantize_mx", _backward, setup_context=_save)

linear_fake_quantize_mx = torch.ops.pt2mx.linear_fake_quantize_mx.default
register_autocast(linear_fake_quantize_mx, of_product=7)
