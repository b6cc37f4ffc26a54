"""Products with packed weights on the CPU, in C++ (`src/linear.cpp`): the weight is decoded in registers.

Weights count with their exact values and sums are in fp32, each in one order whatever the number of threads. A few rows
of x are multiplied by vectors; one row in bfloat16, with a weight of 4 or 6 bits, by products of pairs where the
processor has AVX512_BF16. More rows in bfloat16 go through the matrix registers of AMX where the processor has
them (subnormal values of x count as zero there, as in torch's own product), and else through `dequantize_then_matmul`.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from pt2mx.formats import ELEMENTS
from pt2mx.kernels import dequantize_then_matmul, elements
from pt2mx.kernels.cpu.build import DTYPES, load
from pt2mx.kernels.cpu.hadamard import rotate
from pt2mx.kernels.packing import group_of
from pt2mx.spec import MXSpec

__all__ = ["grouped_linear", "linear"]

#: elements that are decoded in registers, where blocks are whole groups of 32 -> cpp's number of how
_FORMATS = {
    **{name: 1 for name, element in ELEMENTS.items() if element.bits == 4},
    **{"fp8_e4m3": 2, "fp8_e5m2": 3, "fp6_e3m2": 4, "fp6_e2m3": 5, "int8": 6, "int8_full": 6},
}
TABLE, _GROUP = 0, 32

#: rows of x up to which vectors are faster than AMX, and than a dense product
_FEW_ROWS, _SOME_ROWS = 4, 32
#: rows of x that stay in the second-level cache with AMX, and from which on more of the weight is decoded at a time
_PANEL, _MANY_ROWS = 256, 64


class _Call(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in ("format", "bits", "codes_per_group", "bytes_per_group", "dtype", "tiles")
        ),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "block", "row_bytes", "row_blocks", "rotation")),
        *((name, ctypes.c_void_p) for name in ("x", "data", "scale", "bias", "out")),
    )


def linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, spec: MXSpec, rotation: int = 0) -> Tensor:
    """As `pt2mx.kernels.dequantize_then_matmul.linear`."""
    rows, n = x.shape[:-1].numel(), data.shape[0]
    if rotation and (rows > _FEW_ROWS or not rows):  # on all threads
        x, rotation = rotate(x, rotation), 0
    tiled = rows > _FEW_ROWS and x.dtype == torch.bfloat16 and decoder_of(spec, x.shape[-1])[0] and _has_tiles()
    if 0 in (x.numel(), n) or (rows > _SOME_ROWS and not tiled):
        return dequantize_then_matmul.linear(x, data, scale, bias, spec)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device="cpu")
    weight = data.contiguous(), scale.contiguous(), None if bias is None else bias.contiguous()
    flat = x.contiguous().view(rows, x.shape[-1]), out.view(rows, n)
    for panel, result in zip(*(t.split(_PANEL) for t in flat), strict=True):
        _multiply(panel, *weight, result, spec, _tiles(len(panel), n) if tiled else 0, rotation)
    return out


def grouped_linear(x: Tensor, data: Tensor, scale: Tensor, offs: Tensor, spec: MXSpec) -> Tensor:
    """As that of `pt2mx.kernels.dequantize_then_matmul`; rows of x past the last offset (undefined there) give 0."""
    out, first = torch.zeros((x.shape[0], data.shape[1]), dtype=x.dtype, device="cpu"), 0
    spec = spec.replace(axis=spec.axis - 1)  # of one expert
    for expert, last in enumerate(offs.tolist()):
        if first < last:
            out[first:last] = linear(x[first:last], data[expert], scale[expert], None, spec)
        first = last
    return out


def _tiles(rows: int, n: int) -> int:
    """Return how many times 32 rows of the weight go together: more of them reuse x, and each thread has some."""
    return 1 if rows <= _MANY_ROWS else max(1, min(8, n // (64 * torch.get_num_threads())))


def _multiply(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    spec: MXSpec,
    tiles: int,
    rotation: int,
) -> None:
    """x: (M, K), data: (N, bytes), scale: (N, blocks), bias: (N,) or None, out: (M, N), all contiguous."""
    library, parallel_for = load()
    decoder, block = decoder_of(spec, x.shape[1])
    codes_per_group, bytes_per_group = group_of(spec.element.bits)
    call = _Call(
        table=table_of(spec.element.name).data_ptr(),
        format=decoder,
        bits=spec.element.bits,
        codes_per_group=codes_per_group,
        bytes_per_group=bytes_per_group,
        dtype=DTYPES.index(x.dtype),
        tiles=tiles,
        m=x.shape[0],
        n=data.shape[0],
        k=x.shape[1],
        block=block,
        row_bytes=data.shape[1],
        row_blocks=scale.shape[1],
        rotation=rotation,
        x=x.data_ptr(),
        data=data.data_ptr(),
        scale=scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
    )
    if library.pt2mx_linear(ctypes.addressof(call), parallel_for):
        raise RuntimeError("torch_parallel_for failed")


def decoder_of(spec: MXSpec, k: int) -> tuple[int, int]:
    """Return how the C++ decodes rows of `k` values, and their block size: of one block as a whole, in whole groups."""
    block = spec.block_size if spec.block_size < k else -(-k // _GROUP) * _GROUP
    return TABLE if block % _GROUP else _FORMATS.get(spec.element.name, TABLE), block


@functools.cache
def table_of(name: str) -> Tensor:
    """Values of the 256 bytes that may hold a code, (256,) fp32."""
    element = ELEMENTS[name]
    codes = torch.arange(256, dtype=torch.int32) & ((1 << element.bits) - 1)
    return elements.decode(codes, element)


@functools.cache
def _has_tiles() -> bool:
    return bool(load()[0].pt2mx_has_tiles())
