"""Products with packed weights whose activation is quantized before it is stored, by the units of `linear.py`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pt2mx.kernels.cpu.activations import ACTIVATIONS
from pt2mx.kernels.cpu.build import DTYPES, load
from pt2mx.kernels.cpu.linear import FEW_ROWS, call_of, is_served, units_for
from pt2mx.kernels.cpu.quantize import spec_of
from pt2mx.modes import SCALE_MODES
from pt2mx.spec import MXSpec

#: values of a block: those of a row that the kernel finishes at a time
BLOCK = 32


def suits(quantization: MXSpec, n: object, product_dtype: torch.dtype | None) -> bool:
    """True if the kernel quantizes products of n columns, rounded to a dtype: a block is what it finishes at a time."""
    element, mode = quantization.element, SCALE_MODES[quantization.scale_mode]
    whole = isinstance(n, int) and n % BLOCK == 0 and min(quantization.block_size, n) == BLOCK
    in_registers = quantization.rounding == "even" and not mode.searches and not element.is_wide
    return whole and in_registers and product_dtype in (torch.float32, torch.bfloat16)


class Epilogue(ctypes.Structure):
    _fields_ = (
        ("spec", ctypes.c_void_p),
        ("activation", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("block", ctypes.c_int64),
        ("residual", ctypes.c_void_p),
        ("activated", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, quantization: MXSpec, activation: str, dtype: torch.dtype) -> Epilogue:
        """Blocks of `BLOCK` values of an activation, quantized, in a dtype."""
        table = spec_of(quantization)
        numbers = ACTIVATIONS.index(activation), DTYPES.index(dtype)
        epilogue = cls(ctypes.addressof(table), *numbers, BLOCK)
        epilogue.table = table  # as long as this
        return epilogue


def linear_fake_quantize(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    spec: MXSpec,
    product_dtype: torch.dtype,
    activation: str,
    quantization: MXSpec,
    dtype: torch.dtype,
) -> Tensor | None:
    """x: (..., K) bfloat16, the weight (N, K) packed, bias: (N,) in `product_dtype` or None -> (..., N) in `dtype`: the
    quantized activation of the product, to the bit what two steps give. None where units do not serve."""
    rows, n = x.shape[:-1].numel(), data.shape[0]
    units = units_for(spec, x.shape[-1]) if x.dtype == torch.bfloat16 and rows > FEW_ROWS else 0
    if not units or not x.numel() or not suits(quantization, n, product_dtype):
        return None
    epilogue = Epilogue.of(quantization, activation, dtype)
    x, data, scale = (t.contiguous() for t in (x, data, scale))
    bias = None if bias is None else bias.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device="cpu")
    call = call_of(x, data, scale, bias, out, spec, units)
    call.out_dtype = DTYPES.index(product_dtype)
    call.epilogue = ctypes.addressof(epilogue)
    library, parallel_for = load()
    return out if is_served(library.pt2mx_linear(ctypes.addressof(call), parallel_for)) else None
