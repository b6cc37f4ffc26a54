"""Convolutions with packed weights on the CPU, in C++ (`src/im2col.h`), by matrix instructions.

A convolution is a matmul: rows of the pixels under its kernel times the weight (im2col). The C++ gathers some rows at a
time as it multiplies them, and converts each pixel to codes once. With few channels it multiplies all pixels under a
row of the kernel as one (`src/conv_small_channels.h`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.kernels.constants import has_e8m0_rows, supports_epilogue
from pt2mx.kernels.cpu.activations import epilogue_of
from pt2mx.kernels.cpu.build import DTYPES, load
from pt2mx.kernels.cpu.calls import ConvolutionCall, Epilogue, Pair
from pt2mx.kernels.cpu.linear import FEW_ROWS, call_of, is_computed, isa_for
from pt2mx.kernels.dequantize_then_matmul import conv2d_shape
from pt2mx.spec import MXSpec

__all__ = ["conv2d", "conv2d_fake_quantize"]


def conv2d(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    spec: MXSpec,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    dtype: torch.dtype | None = None,
    tensor_scale: Tensor | None = None,
) -> Tensor | None:
    """Return None if no matrix instructions support the weight, or the values, and for scales other than E8M0."""
    conv_args, dtype = (stride, padding, dilation), dtype or x.dtype
    out = torch.empty(conv2d_shape(x, data, conv_args), dtype=dtype, device="cpu")
    return out if _convolve(x, data, scale, bias, spec, conv_args, out, dtype) else None


def conv2d_fake_quantize(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    spec: MXSpec,
    conv_args: tuple[Sequence[int], ...],
    product_dtype: torch.dtype,
    residual: Tensor | None,
    activation: str,
    keep_activated: bool,
    quantization: MXSpec,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    """Compute activation(convolution + residual), and quantize it.

    x: (B, H, W, C) bfloat16, bias: (N,) and residual: (B, H', W', N) in `product_dtype`, or None -> the activation (B,
    H', W', N) in `product_dtype`, empty unless it is kept, and its quantized values in `dtype`, the same bits as in two
    steps. Return None if no matrix instructions support the operands.
    """
    shape = conv2d_shape(x, data, conv_args)
    if math.prod(shape[:3]) <= FEW_ROWS or not supports_epilogue(quantization, len(data), product_dtype):
        return None
    if residual is not None and residual.dtype != product_dtype:
        return None
    out = torch.empty(shape, dtype=dtype, device="cpu")
    activated = torch.empty(shape if keep_activated else (0,), dtype=product_dtype, device="cpu")
    epilogue = epilogue_of(quantization, activation, dtype)
    if residual is not None:
        residual = residual.contiguous()
        epilogue.residual = residual.data_ptr()
    if keep_activated:
        epilogue.activated = activated.data_ptr()
    computed = _convolve(x, data, scale, bias, spec, conv_args, out, product_dtype, epilogue)
    return (activated, out) if computed else None


def _convolve(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    spec: MXSpec,
    conv_args: tuple[Sequence[int], ...],
    out: Tensor,
    dtype: torch.dtype,
    epilogue: Epilogue | None = None,
) -> bool:
    """Compute a convolution, rounded to `dtype`; return False if no matrix instructions support it. `conv_args`:
    stride, padding, dilation."""
    stride, padding, dilation = conv_args
    if tuple(data.shape[1:3]) == (1, 1) and not any(padding):  # strides skip pixels
        x, stride = x[:, :: stride[0], :: stride[1]], (1, 1)
    isa = isa_for(spec, x.shape[-1]) if x.dtype == torch.bfloat16 and has_e8m0_rows(spec) else 0
    if not isa or 0 in (x.numel(), out.numel()):
        return False
    x, data, scale = x.contiguous(), data.contiguous(), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    size, kernel = x.shape[1:3], data.shape[1:3]
    pairs = (Pair(*map(int, pair)) for pair in (size, out.shape[1:3], kernel, stride, padding, dilation))
    linear = call_of(x, data, scale, bias, out, spec, isa, kernel.numel())
    linear.out_dtype = DTYPES.index(dtype)
    linear.epilogue = None if epilogue is None else ctypes.addressof(epilogue)
    call = ConvolutionCall(linear, x.shape[:3].numel(), *pairs)
    library, parallel_for = load()
    return is_computed(library.pt2mx_convolution(ctypes.addressof(call), parallel_for))
