"""`torch.ops.pt2mx.conv2d_mx`: convolutions with weights that stay packed, their channels last.

They compute what `conv2d(x, dequantize_mx(weight))` does, with fp32 sums in another order, and are what the lowered
program calls (`pt2mx.fx.passes.convolutions_as_matmuls`). `pt2mx.kernels.dequantize_then_matmul` defines them on every
device; the CPU's kernel makes no patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.kernels.dequantize_then_matmul import conv2d_shape
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.autocast import register_autocast
from pt2mx.ops.checks import HIGH_PRECISION, check_packed
from pt2mx.spec import MXSpec

aten = torch.ops.aten


def _conv2d(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """x: (B, H, W, C) float, data: (N, *kernel, bytes of C) uint8, scale: (N, *kernel, blocks) uint8, bias: (N,) as the
    result or None -> (B, H', W', N) in the target dtype, by default x's."""
    spec, moves, dtype = check_convolution(x, data, scale, bias, *rest)
    return run_kernel("conv2d_mx", x, data, scale, bias, spec, *moves, dtype)


def _conv2d_fake(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    _, moves, dtype = check_convolution(x, data, scale, bias, *rest)
    return x.new_empty(conv2d_shape(x, data, moves), dtype=dtype)


def check_convolution(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    elem: str,
    block_size: int,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    target_dtype: torch.dtype | None = None,
) -> tuple[MXSpec, tuple[Sequence[int], ...], torch.dtype]:
    """Return the weight's spec, the moves and the dtype of the result; MXError for what does not fit."""
    dtype, moves = target_dtype or x.dtype, (stride, padding, dilation)
    if x.dim() != 4 or data.dim() != 4 or x.device != data.device:
        raise MXError(
            f"x of shape {tuple(x.shape)} on {x.device} and codes of shape {tuple(data.shape)} on {data.device}, not "
            "(B, H, W, C) and (N, *kernel, bytes of C) on one device: put the channels last"
        )
    if dtype not in HIGH_PRECISION:
        raise MXError(f"target_dtype={dtype} must be float32, float16 or bfloat16, or None for that of x")
    if bias is not None and (bias.shape != data.shape[:1] or bias.dtype != dtype or bias.device != x.device):
        raise MXError(
            f"bias of shape {tuple(bias.shape)}, {bias.dtype} on {bias.device} does not fit a weight of "
            f"{data.shape[0]} rows and a result in {dtype} on {x.device}"
        )
    if 0 in (*x.shape[1:], *data.shape[:3]):
        raise MXError(
            f"x of shape {tuple(x.shape)} and codes of shape {tuple(data.shape)} have no pixel, channel or row: none "
            "of these may be 0"
        )
    if any(len(pair) != 2 for pair in moves) or min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        raise MXError(
            f"stride={list(stride)} and dilation={list(dilation)} must be at least 1, padding={list(padding)} at least "
            "0, two numbers each: of height and width"
        )
    if any(isinstance(n, int) and n < 1 for n in conv2d_shape(x, data, moves)[1:3]):
        raise MXError(
            f"x of shape {tuple(x.shape)} with padding={list(padding)} is smaller than a kernel of "
            f"{tuple(data.shape[1:3])} with dilation={list(dilation)}: pad it"
        )
    try:
        spec, _ = check_packed(data, scale, elem, block_size, x.dtype, -1, x.shape[-1])
    except MXError as error:
        raise MXError(f"x of shape {tuple(x.shape)} under a weight of {tuple(data.shape)} bytes: {error}") from None
    return spec, moves, dtype


def _save_weight(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, data, scale, _, ctx.elem, ctx.block_size, *ctx.moves, _ = inputs
    ctx.shape, ctx.dtype = x.shape, x.dtype
    ctx.save_for_backward(data, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    data, scale = ctx.saved_tensors
    weight = ops.dequantize_mx(data, scale, ctx.elem, ctx.block_size, grad.dtype, -1, ctx.shape[-1])
    x = grad.new_empty(1).expand(ctx.shape).permute(0, 3, 1, 2)  # whose values do not count
    given = (grad.permute(0, 3, 1, 2), x, weight.permute(0, 3, 1, 2), None, *ctx.moves, False, [0, 0], 1)
    of_x, _, _ = aten.convolution_backward.default(*given, [True, False, False])
    bias = grad.sum((0, 1, 2)) if ctx.needs_input_grad[3] else None
    return of_x.permute(0, 2, 3, 1).to(ctx.dtype), None, None, bias, *(None,) * 6


torch.library.define(
    "pt2mx::conv2d_mx",
    "(Tensor x, Tensor weight_data, Tensor weight_scale, Tensor? bias, str elem_dtype_name, int block_size, "
    "int[2] stride=1, int[2] padding=0, int[2] dilation=1, ScalarType? target_dtype=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),  # kernels take any strides
)
torch.library.impl("pt2mx::conv2d_mx", "CompositeExplicitAutograd", _conv2d)
torch.library.register_fake("pt2mx::conv2d_mx", _conv2d_fake)
torch.library.register_autograd("pt2mx::conv2d_mx", _backward, setup_context=_save_weight)

conv2d_mx = torch.ops.pt2mx.conv2d_mx.default
register_autocast(conv2d_mx)
