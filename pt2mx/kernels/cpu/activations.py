"""Activations and layer norms with fused quantization, in one pass over memory, in C++ (`src/activations.cpp`).

GELU, SiLU and norms are as exact as torch's; quantization equals the definition to the bit.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.cpu.build import DTYPES, run
from pt2mx.kernels.cpu.calls import ActivationCall, Epilogue
from pt2mx.kernels.cpu.quantize import spec_of
from pt2mx.kernels.cpu.repeated import keep
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.activations import ActivationFakeQuantize, LayerNormFakeQuantize


#: activations in the order of the C++ enumeration
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")


def activation_fake_quantize(call: ActivationFakeQuantize[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor:
    activation = ACTIVATIONS.index(call.activation)

    def quantized(x: Tensor, *_: object) -> Tensor:
        out = torch.empty(x.shape, dtype=dtype, device="cpu")
        _run(x.contiguous(), out, spec, activation=activation)
        return out

    keep(call, quantized)
    return quantized(call.x)


def layer_norm_fake_quantize(
    call: LayerNormFakeQuantize[Tensor], spec: MXSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x = call.x.contiguous()
    residual, weight, bias = (None if t is None else t.contiguous() for t in (call.residual, call.weight, call.bias))
    normed, out = torch.empty_like(x), torch.empty(x.shape, dtype=dtype, device="cpu")
    tensors = {"residual": residual, "weight": weight, "bias": bias, "normed": normed}
    dtypes = {
        f"{name}_dtype": DTYPES.index(t.dtype) for name, t in (("weight", weight), ("bias", bias)) if t is not None
    }
    pointers = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
    _run(x, out, spec, is_norm=1, eps=call.eps, **dtypes, **pointers)
    return normed, out


def _run(x: Tensor, out: Tensor, spec: MXSpec, **fields: float) -> None:
    """Quantize the contiguous x into `out`, along its last dimension."""
    if x.numel():
        run("pt2mx_quantize_activation", call_of(x, out, spec, **fields))


def call_of(x: Tensor, out: Tensor, spec: MXSpec, **fields: float) -> ctypes.Structure:
    """Return the call that quantizes the contiguous x, which has values, into `out`, along its last dimension."""
    n = x.shape[-1] if x.dim() else 1
    table = spec_of(spec)
    call = ActivationCall(
        spec=ctypes.addressof(table),
        dtype=DTYPES.index(x.dtype),
        out_dtype=DTYPES.index(out.dtype),
        rows=x.numel() // n,
        n=n,
        block=min(spec.block_size, n),
        x=x.data_ptr(),
        out=out.data_ptr(),
        **fields,
    )
    call.table = table  # the call points into the table
    return call


def epilogue_of(quantization: MXSpec, activation: str, dtype: torch.dtype) -> ctypes.Structure:
    """Return the epilogue that applies an activation, then quantizes blocks of `BLOCK` values and stores them in a
    dtype."""
    table = spec_of(quantization)
    epilogue = Epilogue(ctypes.addressof(table), ACTIVATIONS.index(activation), DTYPES.index(dtype), BLOCK)
    epilogue.table = table  # the epilogue points into the table, so it must keep the table alive
    return epilogue
