"""Products with packed weights whose activation is quantized before it is stored, by the units of `linear.py`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pt2mx.kernels.constants import BLOCK, supports_epilogue
from pt2mx.kernels.cpu.activations import ACTIVATIONS
from pt2mx.kernels.cpu.build import DTYPES, load
from pt2mx.kernels.cpu.calls import Epilogue
from pt2mx.kernels.cpu.linear import FEW_ROWS, call_of, is_served, units_for
from pt2mx.kernels.cpu.quantize import spec_of
from pt2mx.spec import MXSpec


def epilogue_of(quantization: MXSpec, activation: str, dtype: torch.dtype) -> Epilogue:
    """Return the epilogue that quantizes an activation in blocks of `BLOCK` values, to a dtype."""
    table = spec_of(quantization)
    epilogue = Epilogue(ctypes.addressof(table), ACTIVATIONS.index(activation), DTYPES.index(dtype), BLOCK)
    epilogue.table = table  # which must live as long
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
    if not units or not x.numel() or not supports_epilogue(quantization, n, product_dtype):
        return None
    epilogue = epilogue_of(quantization, activation, dtype)
    x, data, scale = (t.contiguous() for t in (x, data, scale))
    bias = None if bias is None else bias.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device="cpu")
    call = call_of(x, data, scale, bias, out, spec, units)
    call.out_dtype = DTYPES.index(product_dtype)
    call.epilogue = ctypes.addressof(epilogue)
    library, parallel_for = load()
    return out if is_served(library.pt2mx_linear(ctypes.addressof(call), parallel_for)) else None
