"""Convolutions with packed weights on the CPU, in C++ (`src/im2col.h`), by matrix instructions.

A convolution is a matmul: rows of the pixels under its kernel times the weight (im2col). The C++ gathers some rows at a
time as it multiplies them, and converts each pixel to codes once. With few channels it multiplies all pixels under a
row of the kernel as one (`src/conv_small_channels.h`).
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.kernels.constants import supports_epilogue
from pt2mx.kernels.cpu.activations import epilogue_of
from pt2mx.kernels.cpu.build import DTYPES, run
from pt2mx.kernels.cpu.calls import ConvolutionCall
from pt2mx.kernels.cpu.linear import FEW_ROWS, call_of, isa_for
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.convolution import Conv2dMX
    from pt2mx.ops.quantize_epilogue import Conv2dFakeQuantize


def conv2d(call: Conv2dMX[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor | None:
    """Return None if no matrix instructions support the weight, or the values."""
    out = torch.empty(call.result_shape, dtype=dtype, device="cpu")
    return out if _convolve(call, spec, out, dtype) else None


def conv2d_fake_quantize(
    call: Conv2dFakeQuantize[Tensor],
    spec: MXSpec,
    product_dtype: torch.dtype,
    sum_dtype: torch.dtype,
    quantization: MXSpec,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    """Compute activation(convolution + residual), and quantize it.

    x: (B, H, W, C) bfloat16, bias: (N,) and residual: (B, H', W', N) in `product_dtype`, or None -> the activation (B,
    H', W', N) in `product_dtype`, empty unless it is kept, and its quantized values in `dtype`, the same bits as in two
    steps. Return None if no matrix instructions support the operands.
    """
    conv, residual = call.conv, call.residual
    shape = conv.result_shape
    if math.prod(shape[:3]) <= FEW_ROWS or not supports_epilogue(quantization, len(call.codes), product_dtype):
        return None
    if residual is not None and residual.dtype != product_dtype:
        return None
    out = torch.empty(shape, dtype=dtype, device="cpu")
    activated = torch.empty(shape if call.keep_activated else (0,), dtype=product_dtype, device="cpu")
    epilogue = epilogue_of(quantization, call.activation, dtype)
    if residual is not None:
        residual = residual.contiguous()
        epilogue.residual = residual.data_ptr()
    if call.keep_activated:
        epilogue.activated = activated.data_ptr()
    computed = _convolve(conv, spec, out, product_dtype, epilogue)
    return (activated, out) if computed else None


def _convolve(
    call: Conv2dMX[Tensor], spec: MXSpec, out: Tensor, dtype: torch.dtype, epilogue: ctypes.Structure | None = None
) -> bool:
    """Compute a convolution, rounded to `dtype`; return False if no matrix instructions support it."""
    x, stride = call.x, call.stride
    kernel = call.codes.shape[1:3]
    if tuple(kernel) == (1, 1) and not any(call.padding):  # strides skip pixels
        x, stride = x[:, :: stride[0], :: stride[1]], (1, 1)
    isa = isa_for(spec, x.shape[-1]) if x.dtype == torch.bfloat16 else 0
    if not isa or 0 in (x.numel(), out.numel()):
        return False
    x, data, scale = x.contiguous(), call.codes.contiguous(), call.scale.contiguous()
    bias = None if call.bias is None else call.bias.contiguous()
    sizes = x.shape[1:3], out.shape[1:3], kernel, stride, call.padding, call.dilation
    pairs = (tuple(map(int, pair)) for pair in sizes)
    linear = call_of(x, data, scale, bias, out, spec, isa, kernel.numel())
    linear.out_dtype = DTYPES.index(dtype)
    linear.epilogue = None if epilogue is None else ctypes.addressof(epilogue)
    return run("pt2mx_convolution", ConvolutionCall(linear, x.shape[:3].numel(), *pairs))
