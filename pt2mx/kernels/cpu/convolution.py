"""Convolutions with packed weights on the CPU, in C++ (`src/windows.h`), on units for bfloat16 or AVX512_VNNI.

A convolution is the product of what lies under its kernel with the weight as rows. Rows are gathered as they are
multiplied, some of them at a time; where they are converted to codes first, each pixel is once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.kernels import dequantize_then_matmul
from pt2mx.kernels.cpu.build import load
from pt2mx.kernels.cpu.linear import Call, call_of, is_served, units_for
from pt2mx.kernels.dequantize_then_matmul import places
from pt2mx.spec import MXSpec

__all__ = ["conv2d"]

_Pair = ctypes.c_int64 * 2


class _Convolution(ctypes.Structure):
    _fields_ = (
        ("linear", Call),
        ("pixels", ctypes.c_int64),
        *((name, _Pair) for name in ("size", "out_size", "kernel", "stride", "padding", "dilation")),
    )


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
) -> Tensor:
    """As `pt2mx.kernels.dequantize_then_matmul.conv2d`."""
    if tuple(data.shape[1:3]) == (1, 1) and not any(padding):  # what lies between the strides is not read
        x, stride = x[:, :: stride[0], :: stride[1]], (1, 1)
    units = units_for(spec, x.shape[-1]) if x.dtype == torch.bfloat16 else 0
    out = _on_units(x, data, scale, bias, spec, (stride, padding, dilation), dtype or x.dtype, units)
    if out is None:
        return dequantize_then_matmul.conv2d(x, data, scale, bias, spec, stride, padding, dilation, dtype)
    return out


def _on_units(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    spec: MXSpec,
    moves: tuple[Sequence[int], ...],
    dtype: torch.dtype,
    units: int,
) -> Tensor | None:
    """The convolution; None where no unit serves. `moves`: stride, padding, dilation."""
    size, kernel = x.shape[1:3], data.shape[1:3]
    out_size = places(size, kernel, *moves)
    out = torch.empty((len(x), *out_size, len(data)), dtype=dtype, device="cpu")
    if not units or 0 in (x.numel(), out.numel()):
        return None
    x, data, scale = x.contiguous(), data.contiguous(), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    pairs = (_Pair(*map(int, pair)) for pair in (size, out_size, kernel, *moves))
    linear = call_of(x, data, scale, bias, out, spec, units, kernel.numel())
    call = _Convolution(linear, x.shape[:3].numel(), *pairs)
    library, parallel_for = load()
    return out if is_served(library.pt2mx_convolution(ctypes.addressof(call), parallel_for)) else None
