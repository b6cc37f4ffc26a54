"""`torch.ops.pt2mx.conv2d_fake_quantize_mx`: an activation of `conv2d_mx` and of what is added to it, quantized, by one
kernel.

Lowered programs for the CPU call it (`pt2mx.fx.passes.fuse_quantize_epilogue`), and Inductor keeps it a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pt2mx.errors import MXError
from pt2mx.kernels.dequantize_then_matmul import conv2d_shape
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.autocast import register_autocast
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.ops.convolution import check_convolution, conv2d_mx
from pt2mx.ops.quantized_activations import activation_fake_quantize_mx, check_activation, check_quantization
from pt2mx.spec import MXSpec


def _conv2d(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    spec, moves, product_dtype, _, quantization, dtype = _check(x, data, scale, bias, *rest)
    args = data, scale, bias, spec, moves, product_dtype, *rest[6:9], quantization, dtype
    results = run_kernel("conv2d_fake_quantize_mx", x, *args)
    return in_two_steps(x, data, scale, bias, *rest) if results is None else results


def in_two_steps(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *rest: Any,
    convolve: Callable[..., Tensor] = conv2d_mx,
    quantize: Callable[..., Tensor] = activation_fake_quantize_mx,
) -> tuple[Tensor, Tensor]:
    """The definition of `conv2d_fake_quantize_mx`, by the operators or their decompositions."""
    residual, activation, keep_activated, *modes = rest[6:]
    product = convolve(x, data, scale, bias, *rest[:6])
    summed = product if residual is None else product + residual
    quantized = quantize(summed, activation, *modes)
    activated = ACTIVATIONS[activation](summed).contiguous() if keep_activated else summed.new_empty(0)
    return activated, quantized


def _conv2d_fake(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    _, moves, _, sum_dtype, _, dtype = _check(x, data, scale, bias, *rest)
    shape = conv2d_shape(x, data, moves)
    return x.new_empty(shape if rest[8] else (0,), dtype=sum_dtype), x.new_empty(shape, dtype=dtype)


def _check(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    elem: str,
    block_size: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    product_dtype: torch.dtype | None,
    residual: Tensor | None,
    activation: str,
    keep_activated: bool,
    out_elem: str,
    out_block_size: int,
    scale_mode: str = "floor",
    rounding: str = "even",
    target_dtype: torch.dtype | None = None,
) -> tuple[MXSpec, tuple[Sequence[int], ...], torch.dtype, torch.dtype, MXSpec, torch.dtype]:
    """Return the weight's spec, the moves, the dtypes of the product and of its sum with the residual, how the
    activation is quantized, and in which dtype."""
    spec, moves, product_dtype = check_convolution(
        x, data, scale, bias, elem, block_size, stride, padding, dilation, product_dtype
    )
    check_activation(activation)
    sum_dtype, shape = product_dtype, conv2d_shape(x, data, moves)
    if residual is not None:
        if residual.shape != shape or residual.dtype not in HIGH_PRECISION or residual.device != x.device:
            raise MXError(
                f"the residual of shape {tuple(residual.shape)}, {residual.dtype} on {residual.device} must be "
                f"{tuple(shape)} in float32, float16 or bfloat16 on {x.device}, as the result of the convolution"
            )
        sum_dtype = torch.promote_types(product_dtype, residual.dtype)
    try:
        modes = (out_elem, out_block_size, scale_mode, rounding, target_dtype or sum_dtype)
        quantization, dtype = check_quantization(x, *modes)
    except MXError as error:
        raise MXError(f"the result of the convolution: {error}") from None
    return spec, moves, product_dtype, sum_dtype, quantization, dtype


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, data, scale, bias, *rest = inputs
    ctx.rest = (*rest[:6], None, *rest[7:])
    ctx.save_for_backward(x, data, scale, bias, rest[6])


@once_differentiable  # a second derivative is an error
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of the two steps, which are computed again."""
    x, data, scale, bias, residual = ctx.saved_tensors
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):  # as the product was cast already
        own = x.detach().requires_grad_()
        others = [None if t is None else t.detach().requires_grad_() for t in (bias, residual)]
        found = in_two_steps(own, data, scale, others[0], *ctx.rest[:6], others[1], *ctx.rest[7:])
    leaves = [t for t in (own, *others) if t is not None]
    kept = [(y, grad) for y, grad in zip(found, grads, strict=True) if y.requires_grad]
    outputs, of_outputs = zip(*kept, strict=True)
    of_leaves = iter(torch.autograd.grad(outputs, leaves, of_outputs))
    of_x, of_bias, of_residual = (None if t is None else next(of_leaves) for t in (x, bias, residual))
    return of_x, None, None, of_bias, *(None,) * 6, of_residual, *(None,) * 7


torch.library.define(
    "pt2mx::conv2d_fake_quantize_mx",
    "(Tensor x, Tensor weight_data, Tensor weight_scale, Tensor? bias, str elem_dtype_name, int block_size, "
    "int[2] stride, int[2] padding, int[2] dilation, ScalarType? product_dtype, Tensor? residual, str activation, "
    "bool keep_activated, str out_elem_dtype_name, int out_block_size, "
    'str scale_mode="floor", str rounding="even", ScalarType? target_dtype=None) -> '
    "(Tensor activated, Tensor quantized)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
torch.library.impl("pt2mx::conv2d_fake_quantize_mx", "CompositeExplicitAutograd", _conv2d)
torch.library.register_fake("pt2mx::conv2d_fake_quantize_mx", _conv2d_fake)
torch.library.register_autograd("pt2mx::conv2d_fake_quantize_mx", _backward, setup_context=_save)

conv2d_fake_quantize_mx = torch.ops.pt2mx.conv2d_fake_quantize_mx.default
register_autocast(conv2d_fake_quantize_mx, of_product=10)
