"""Linear layers with packed weights on the CPU, in C++ (`src/linear.cpp`), which decodes the weight in registers.

Weights are decoded exactly, and sums are in fp32, in an order that does not depend on the number of threads. A few rows
whose values are 8-bit integers times a power of two a block, as MXINT8 activations have, are multiplied as integers
(`src/dot_int8.h`, `src/linear_int8.h`). One other row runs on fp32 vectors or AVX512_BF16; other calls with a few rows
run on fp32 vectors, or in bfloat16 on AMX (which treats subnormal values of x as zero, as torch's own matmul does). AMX
multiplies fp32 values that bfloat16 does not represent as sums of three bfloat16 values (`src/linear_amx.h`). Other
calls decode the weight first, and multiply by AMX or AVX512_BF16 (`src/gemm_bf16.h`), or as integers on every processor
with AVX2 (`src/gemm_int8.h`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.kernels.constants import supports_epilogue
from pt2mx.kernels.cpu.activations import epilogue_of
from pt2mx.kernels.cpu.build import DTYPES, is_available, load, run
from pt2mx.kernels.cpu.calls import LinearCall
from pt2mx.kernels.cpu.hadamard import rotate
from pt2mx.kernels.cpu.quantize import TABLE, decoder_of, float_scale_of, supports, table_of
from pt2mx.kernels.cpu.repeated import keep
from pt2mx.kernels.packing import group_of
from pt2mx.kernels.select import run_kernel
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.linear import GroupedLinearMX, LinearMX
    from pt2mx.ops.quantize_epilogue import LinearFakeQuantize


#: significant bits of a bfloat16
_BFLOAT_BITS = 8

#: most rows of x for which fp32 vectors are faster than matrix instructions, and than a dense matmul, as in C++
VECTOR_ROWS, FEW_ROWS = 4, 32
#: bits of the matrix instructions for many rows of bfloat16 values, as in C++, which uses the first one that fits;
#: INT8: any of those below, for values that are integers times a power of two a block
AMX, INT8, AVX512_BF16 = 1, 2, 4
#: bits of the instructions for integers, as in C++, which prefers VPDPBUSD, and TDPBSSD, of AMX, for 8 to 32 rows; SDOT
#: of AArch64, and VPERMB, besides VPDPBUSD, are for up to 4 rows
VPMADDUBSW, VPDPBUSD, TDPBSSD, SDOT, VPERMB = 1, 2, 4, 8, 16


def linear(call: LinearMX[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor | None:
    """Return None for many rows that no matrix instructions support, and for values whose products could be
    subnormal."""
    x, n = call.x, call.codes.shape[0]
    rows = x.shape[:-1].numel()
    isa = matrix_isa_for(spec, rows, x.shape[-1], x.dtype)
    if not supports(spec, call.tensor_scale) or 0 in (x.numel(), n) or not (rows <= FEW_ROWS or isa):
        return None
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device="cpu")
    structure = call_of(x, call.codes, call.scale, call.bias, out, spec, isa)
    structure.rotation = call.rotation
    if not spec.has_power_of_two_scale:
        structure.float_scale = ctypes.addressof(float_scale_of(spec))
        structure.tensor_scale = 1.0 if call.tensor_scale is None else float(call.tensor_scale)
    if not _run(structure, out, x, call.codes, call.scale, call.bias):
        return None
    if call.tensor_scale is None:
        keep(call, functools.partial(_again, structure))
    return out


def _again(structure: ctypes.Structure, *args: Any) -> Any:
    """Run `linear_mx` again; the bias is its fourth argument."""
    x, data, scale, bias = args[:4]
    out = torch.empty((*x.shape[:-1], structure.n), dtype=DTYPES[structure.out_dtype], device="cpu")
    return out if _run(structure, out, x, data, scale, bias) else NotImplemented


def _run(structure: ctypes.Structure, out: Tensor, x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> bool:
    """Run a call on tensors of any strides, which writes the contiguous `out`."""
    call = LinearCall.from_buffer_copy(structure)
    if call.rotation and call.m > VECTOR_ROWS:  # rotate first, on all threads
        x = rotate(x, call.rotation)
        call.rotation = 0
    x, data, scale = x.contiguous(), data.contiguous(), scale.contiguous()
    call.x, call.data, call.scale, call.out = x.data_ptr(), data.data_ptr(), scale.data_ptr(), out.data_ptr()
    if bias is not None:
        bias = bias.contiguous()
        call.bias = bias.data_ptr()
    return run("pt2mx_linear", call)


def linear_fake_quantize(
    call: LinearFakeQuantize[Tensor],
    spec: MXSpec,
    product_dtype: torch.dtype,
    quantization: MXSpec,
    dtype: torch.dtype,
) -> Tensor | None:
    """x: (..., K) bfloat16, the weight (N, K) packed, bias: (N,) in `product_dtype` or None -> (..., N) in `dtype`: the
    quantized activation of the matmul, the same bits as in two steps. Return None if no matrix instructions support the
    operands."""
    x = call.x
    rows, n = x.shape[:-1].numel(), call.codes.shape[0]
    isa = isa_for(spec, x.shape[-1]) if x.dtype == torch.bfloat16 and rows > FEW_ROWS else 0
    if not isa or not x.numel() or not supports_epilogue(quantization, n, product_dtype):
        return None
    epilogue = epilogue_of(quantization, call.activation, dtype)
    x, data, scale = (t.contiguous() for t in (x, call.codes, call.scale))
    bias = None if call.bias is None else call.bias.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device="cpu")
    structure = call_of(x, data, scale, bias, out, spec, isa)
    structure.out_dtype = DTYPES.index(product_dtype)
    structure.epilogue = ctypes.addressof(epilogue)
    return out if run("pt2mx_linear", structure) else None


def grouped_linear(call: GroupedLinearMX[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor:
    """Rows of x past the last offset, whose results the definition leaves undefined, return 0. bfloat16 matrix
    instructions multiply many fp32 rows if bfloat16 represents their values, as it does for quantized values."""
    x, first = call.x, 0
    out = torch.zeros((x.shape[0], call.codes.shape[1]), dtype=dtype, device="cpu")
    spec = spec.replace(axis=spec.axis - 1)  # of one expert
    if dtype != torch.float32:
        x = x.to(dtype)
    elif x.dtype == dtype and len(x) > FEW_ROWS and isa_for(spec, x.shape[-1]) and _are_bfloats(x):
        x = x.to(torch.bfloat16)
    for expert, last in enumerate(call.offs.tolist()):
        if first < last:
            rows = slice(first, last)
            out[rows] = run_kernel(call.of_expert(expert, x[rows], dtype), spec, dtype)
        first = last
    return out


def _are_bfloats(x: Tensor) -> bool:
    """Return whether bfloat16 represents all values of x: (T, K) fp32. It checks the first row first, which usually
    decides a False."""
    return not any((part.contiguous().view(torch.int32) & 0xFFFF).any() for part in (x[:1], x))


def call_of(
    x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, spec: MXSpec, isa: int, taps: int = 1
) -> ctypes.Structure:
    """Return the call of a matmul of contiguous tensors. x: (..., K), data: (N, ..., bytes), scale: (N, ...,
    blocks), bias: (N,) or None, out: (..., N); `taps`: the number of pixels of x, K values each, that a row of the
    weight multiplies."""
    k, (rows, n) = x.shape[-1], (out.shape[:-1].numel(), out.shape[-1])
    decoder, block = decoder_of(spec, k)
    codes_per_group, bytes_per_group = group_of(spec.element.bits)
    call = LinearCall(
        table=ctypes.addressof(table_of(spec.element.name)),
        format=decoder,
        bits=spec.element.bits,
        codes_per_group=codes_per_group,
        bytes_per_group=bytes_per_group,
        dtype=DTYPES.index(x.dtype),
        out_dtype=DTYPES.index(out.dtype),
        isa=isa,
        integer_isa=integer_isa_for(spec, k),
        m=rows,
        n=n,
        k=k,
        block=block,
        row_bytes=data.shape[1:].numel(),
        row_blocks=scale.shape[1:].numel(),
        x=x.data_ptr(),
        data=data.data_ptr(),
        scale=scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
    )
    if isa:
        load()[0].pt2mx_set_tasks(ctypes.addressof(call), taps, torch.get_num_threads())
    return call


def matrix_isa_for(spec: MXSpec, rows: int, k: int, dtype: torch.dtype) -> int:
    """Return the matrix instructions that multiply x: (rows, k) of this dtype by a weight; 0 where vectors do."""
    isa = isa_for(spec, k)
    return load()[0].pt2mx_isa_of_rows(isa, DTYPES.index(dtype), rows) if isa else 0


def isa_for(spec: MXSpec, k: int) -> int:
    """Return the matrix instructions that multiply rows of `k` bfloat16 values by a weight; 0 for none. bfloat16
    represents codes times their scale, without the scale of the tensor, if both have few significant bits."""
    isa = _isa_of(spec, k)[0]
    if spec.has_power_of_two_scale:
        return isa
    return isa & ~INT8 if spec.significant_bits <= _BFLOAT_BITS else 0


def integer_isa_for(spec: MXSpec, k: int) -> int:
    """Return the instructions that multiply rows of `k` values, integers times a power of two a block, by a weight of
    such values; 0 for none."""
    return _isa_of(spec, k)[1] if spec.has_power_of_two_scale else 0


def _isa_of(spec: MXSpec, k: int) -> tuple[int, int]:
    """Return both, for scales that are powers of two; the C++ says what the processor has (`src/linear.cpp`)."""
    decoder, _ = decoder_of(spec, k)
    return _isa(spec.element.name, decoder) if decoder != TABLE else (0, 0)


@functools.cache
def _isa(name: str, decoder: int) -> tuple[int, int]:
    if not is_available():
        return 0, 0
    library, table = load()[0], ctypes.addressof(table_of(name))
    return library.pt2mx_isa(decoder, table), library.pt2mx_integer_isa(decoder, table)
