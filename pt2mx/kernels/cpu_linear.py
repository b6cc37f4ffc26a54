"""Products with packed weights on the CPU, in C++ (`cpu_linear.cpp`): the weight is decoded in registers."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from pt2mx.formats import ELEMENTS
from pt2mx.kernels import dense, reference
from pt2mx.kernels.cpu_build import DTYPES, load
from pt2mx.spec import MXSpec

__all__ = ["grouped_linear", "linear"]

#: elements that are decoded in registers, where blocks are whole groups of 32 -> cpp's number of how
_FORMATS = {
    **{name: 1 for name, element in ELEMENTS.items() if element.bits == 4},
    **{"fp8_e4m3": 2, "fp8_e5m2": 3, "fp6_e3m2": 4, "fp6_e2m3": 5, "int8": 6, "int8_full": 6},
}
_TABLE, _GROUP = 0, 32


class _Call(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("format", "bits", "dtype", "tiles")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "block", "row_bytes", "row_blocks")),
        *((name, ctypes.c_void_p) for name in ("x", "data", "scale", "bias", "out")),
    )


def linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, spec: MXSpec) -> Tensor:
    """As `pt2mx.kernels.dense.linear`."""
    out = torch.empty((*x.shape[:-1], data.shape[0]), dtype=x.dtype, device="cpu")
    if not x.numel() or not out.numel():
        return dense.linear(x, data, scale, bias, spec)
    x, data, scale = x.contiguous(), data.contiguous(), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    n, k = data.shape[0], x.shape[-1]
    _product(x.view(-1, k), data, scale, bias, out.view(-1, n), spec)
    return out


def grouped_linear(x: Tensor, data: Tensor, scale: Tensor, offs: Tensor, spec: MXSpec) -> Tensor:
    """As `pt2mx.kernels.dense.grouped_linear`; rows of x past the last offset give zeros."""
    out = torch.zeros((x.shape[0], data.shape[1]), dtype=x.dtype, device="cpu")
    first = 0
    for expert, last in enumerate(offs.tolist()):
        if first < last:
            out[first:last] = linear(x[first:last], data[expert], scale[expert], None, spec)
        first = last
    return out


def _product(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, spec: MXSpec) -> None:
    """x: (M, K), data: (N, bytes), scale: (N, blocks), bias: (N,) or None, out: (M, N), all contiguous."""
    k, block = x.shape[1], spec.block_size
    if block >= k:  # one block, as whole groups
        block = -(-k // _GROUP) * _GROUP
    table = _table(spec.element.name)
    call = _Call(
        table=table.data_ptr(),
        format=_TABLE if block % _GROUP else _FORMATS.get(spec.element.name, _TABLE),
        bits=spec.element.bits,
        dtype=DTYPES.index(x.dtype),
        tiles=0,
        m=x.shape[0],
        n=data.shape[0],
        k=k,
        block=block,
        row_bytes=data.shape[1],
        row_blocks=scale.shape[1],
        x=x.data_ptr(),
        data=data.data_ptr(),
        scale=scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
    )
    library, parallel_for = load()
    if library.pt2mx_linear(ctypes.addressof(call), parallel_for):
        raise RuntimeError("torch_parallel_for failed")


@functools.cache
def _table(name: str) -> Tensor:
    """Values of the 256 bytes that may hold a code, (256,) fp32."""
    element = ELEMENTS[name]
    codes = torch.arange(256, dtype=torch.int32) & ((1 << element.bits) - 1)
    return reference.decode(codes, element)
