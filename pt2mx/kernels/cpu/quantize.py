"""Quantization on the CPU, in C++ (`src/quantize.cpp`), the sums of its errors (`src/error_sums.cpp`), and what the C++
knows of a spec: its numbers, and the decoder of its codes (`src/decode.h`).

Each takes one pass over memory, on torch's threads. The definition quantizes blocks of several rows, other widths of
E8M0's exponent, and tensor scales near the limits of float32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.formats import BUILT_IN
from pt2mx.kernels import elements
from pt2mx.kernels.constants import float_scale_constants, spec_constants
from pt2mx.kernels.cpu.build import DTYPES, load, run
from pt2mx.kernels.cpu.calls import ErrorSums, ErrorSumsCall, FloatScale, QuantizeCall, Spec
from pt2mx.kernels.cpu.hadamard import rotate
from pt2mx.kernels.cpu.repeated import keep
from pt2mx.kernels.packing import group_of, packed_length, resized
from pt2mx.modes import ROUNDINGS
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.hadamard import RotatedFakeQuantize
    from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize
    from pt2mx.ops.stochastic import RandomBits


# in the order of the C++ enumerations
_BYTE, _TENSOR_SCALES = len(DTYPES), ("", "factor", "divisor")
_QUANTIZE, _DEQUANTIZE, _FAKE_QUANTIZE, _CLIP_GRADIENT = range(4)

#: element that the C++ decodes in registers, in blocks of whole groups of 32 -> the number of its decoder
_DECODERS = {
    **{name: 1 for name, element in BUILT_IN.items() if element.bits == 4},
    **{"fp8_e4m3": 2, "fp8_e5m2": 3, "fp6_e3m2": 4, "fp6_e2m3": 5, "int8": 6, "int8_full": 6},
}
TABLE, _GROUP = 0, 32

#: the range of tensor scales for which no product with a block's scale and a power of two of a decoder overflows
_TENSOR_SCALE_RANGE = 2.0**-100, 2.0**100


def quantize(call: Quantize[Tensor], spec: MXSpec) -> tuple[Tensor, Tensor] | None:
    if not supports(spec, call.tensor_scale):
        return None
    quantized = _quantizer(call.x, spec, call.seed, call.tensor_scale)
    if _has_one_result(call, call.x, spec) and call.seed is None:
        keep(call, quantized)
    return quantized(call.x)


def scales(x: Tensor, spec: MXSpec, tensor_scale: Tensor | None = None) -> Tensor | None:
    if spec.rounding == "stochastic" or x.dtype not in DTYPES or not supports(spec, tensor_scale):
        return None
    return _quantizer(x, spec, None, tensor_scale)(x)[0]  # the codes are not used: another kernel would save little


def _quantizer(
    x: Tensor, spec: MXSpec, seed: Tensor | None, tensor_scale: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return what quantizes tensors like x."""
    scale_shape = spec.scale_shape(x.shape)
    data_shape = resized(x, spec.axis, packed_length(x.shape[spec.axis], spec.element.bits))
    structure = _call_of(_QUANTIZE, spec, x.dtype, x.shape, tensor_scale, seed=seed)

    def quantized(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        scale = torch.empty(scale_shape, dtype=spec.scale_dtype, device="cpu")
        data = torch.empty(data_shape, dtype=torch.uint8, device="cpu")
        _run(structure, x, data, scale)
        return scale, data

    return quantized


def dequantize(call: Dequantize[Tensor], spec: MXSpec, length: int) -> Tensor | None:
    if not supports(spec, call.tensor_scale):
        return None
    dtype, shape = call.dtype, torch.Size(resized(call.codes, spec.axis, length))
    structure = _call_of(_DEQUANTIZE, spec, dtype, shape, call.tensor_scale)
    structure.format, _ = decoder_of(spec, length)
    structure.table = ctypes.addressof(table_of(spec.element.name))

    def dequantized(codes: Tensor, scale: Tensor, *_: object) -> Tensor:
        y = torch.empty(shape, dtype=dtype, device="cpu")
        _run(structure, codes, y, scale)
        return y

    if _has_one_result(call, call.codes, spec):
        keep(call, dequantized)
    return dequantized(call.codes, call.scale)


def fake_quantize(call: FakeQuantize[Tensor], spec: MXSpec) -> Tensor | None:
    x = call.x
    if not supports(spec, call.tensor_scale):
        return None
    structure = _call_of(_FAKE_QUANTIZE, spec, x.dtype, x.shape, call.tensor_scale, seed=call.seed)

    def quantized(x: Tensor, *_: object) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        _run(structure, x, y)
        return y

    if _has_one_result(call, x, spec) and call.seed is None:
        keep(call, quantized)
    return quantized(x)


def rotated_fake_quantize(call: RotatedFakeQuantize[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor:
    structure = _call_of(_FAKE_QUANTIZE, spec, call.x.dtype, call.x.shape)
    structure.out_dtype = DTYPES.index(dtype)
    size = call.size if call.size > 1 else 0
    is_fused = dtype == call.x.dtype  # the fused kernel writes x's dtype

    def quantized(x: Tensor, *_: object) -> Tensor:
        y = torch.empty(x.shape, dtype=dtype, device="cpu")
        if size and is_fused:
            _run(structure, x, y, rotation=size)
        else:
            _run(structure, rotate(x, size) if size else x, y)
        return y

    keep(call, quantized)
    return quantized(call.x)


def clip_gradient(call: ClipGradient[Tensor], spec: MXSpec) -> Tensor | None:
    grad, x = call.grad, call.x
    if grad.shape != x.shape or grad.itemsize not in (2, 4):  # autograd passes x's shape and dtype
        return None
    if not supports(spec, call.tensor_scale):
        return None
    y = torch.empty(x.shape, dtype=grad.dtype, device="cpu")
    structure = _call_of(_CLIP_GRADIENT, spec, x.dtype, x.shape, call.tensor_scale)
    structure.grad_bytes = grad.itemsize
    _run(structure, x, y, grad=grad)
    return y


def random_bits(call: RandomBits[Tensor]) -> Tensor:
    y = torch.empty(call.size, dtype=torch.int32, device="cpu")
    library, parallel_for = load()
    library.pt2mx_random_bits(int(call.seed), y.data_ptr(), y.numel(), parallel_for)
    return y


def error_sums(x: Tensor, y: Tensor, scale: Tensor, spec: MXSpec) -> tuple[Tensor, ...] | None:
    if spec.block_rows > 1 or x.dtype not in DTYPES or y.dtype != x.dtype:
        return None
    x, y, scale, sums = x.contiguous(), y.contiguous(), scale.contiguous(), ErrorSums()
    n = x.shape[spec.axis]
    call = ErrorSumsCall(
        dtype=DTYPES.index(x.dtype),
        low=spec.element.lowest,
        high=spec.element.max_normal,
        outer=x.shape[: spec.axis].numel(),
        n=n,
        inner=x.shape[spec.axis + 1 :].numel(),
        block=min(spec.block_size, n),
        x=x.data_ptr(),
        y=y.data_ptr(),
        scale=scale.data_ptr(),
        sums=ctypes.addressof(sums),
    )
    if x.numel():
        run("pt2mx_error_sums", call)
    dtypes = {"nonfinite": torch.int64, "saturated": torch.int64, "flushed": torch.int64}
    dtypes |= {"signal": torch.float64, "noise": torch.float64}
    return tuple(torch.tensor(getattr(sums, name), dtype=dtype, device="cpu") for name, dtype in dtypes.items())


def _has_one_result(call: Any, x: Tensor, spec: MXSpec) -> bool:
    """Return whether the result of an operator for x is that of its kernel: x is contiguous and no stride is ambiguous,
    the axis is that of the call, and the tensor has no scale."""
    is_whole = x.is_contiguous() and min(x.shape) > 1 and call.tensor_scale is None
    return is_whole and spec.axis == call.spec.axis % x.dim()


def _call_of(
    operation: int,
    spec: MXSpec,
    dtype: torch.dtype,
    shape: torch.Size,
    tensor_scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> ctypes.Structure:
    """Return an operation on values of this shape and dtype, without the pointers of `_run`."""
    n, table = shape[spec.axis], spec_of(spec)
    call = QuantizeCall(
        spec=ctypes.addressof(table),
        operation=operation,
        dtype=DTYPES.index(dtype),
        out_dtype=DTYPES.index(dtype),
        outer=shape[: spec.axis].numel(),
        n=n,
        inner=shape[spec.axis + 1 :].numel(),
        block=min(spec.block_size, n),
        seed=0 if seed is None else int(seed),
        tensor_scale=1.0 if tensor_scale is None else float(tensor_scale),
    )
    call.of_spec = table  # the call points into the table
    return call


def _run(
    structure: ctypes.Structure,
    x: Tensor,
    out: Tensor,
    scale: Tensor | None = None,
    grad: Tensor | None = None,
    rotation: int = 0,
) -> None:
    """Run an operation on x, `scale` and `grad` of any strides, which writes the contiguous `out`, and `scale` where it
    quantizes. `rotation`: the size of the blocks of x that are rotated first, along the last dimension."""
    if not out.numel():
        return
    call, x = QuantizeCall.from_buffer_copy(structure), x.contiguous()
    call.x, call.out = x.data_ptr(), out.data_ptr()
    if scale is not None:
        scale = scale.contiguous()
        call.scale = scale.data_ptr()
    if grad is not None:
        grad = grad.contiguous()
        call.grad = grad.data_ptr()
    if rotation:
        run("pt2mx_rotate_fake_quantize", call, rotation)
    else:
        run("pt2mx_run", call)


def supports(spec: MXSpec, tensor_scale: Tensor | None = None) -> bool:
    """Return whether the C++ kernels support the scales of a spec."""
    least, most = _TENSOR_SCALE_RANGE
    in_range = tensor_scale is None or least <= float(tensor_scale) <= most
    return in_range and spec.has_operators and spec.block_rows == 1


def decoder_of(spec: MXSpec, k: int) -> tuple[int, int]:
    """Return the C++ decoder for rows of `k` values, and the block size; a row of one block is padded to whole
    groups."""
    block = spec.block_size if spec.block_size < k else -(-k // _GROUP) * _GROUP
    least = _GROUP if spec.has_power_of_two_scale else _GROUP // 2
    return TABLE if block % least else _DECODERS.get(spec.element.name, TABLE), block


@functools.cache
def table_of(name: str) -> ctypes.Array[ctypes.c_float]:
    """Return the value of the code in each of the 256 possible bytes."""
    element = BUILT_IN[name]
    return (ctypes.c_float * 256)(*elements.values_of_codes(element) * (256 >> element.bits))


@functools.lru_cache(maxsize=1024)
def spec_of(spec: MXSpec) -> ctypes.Structure:
    """Return the numbers of a spec as the C++ reads them, cached."""
    constants = spec_constants(spec)
    constants["codes_per_group"], constants["bytes_per_group"] = group_of(spec.element.bits)
    constants["rounding"], offsets = list(ROUNDINGS).index(spec.rounding), constants["exponent_offsets"]
    constants["candidates"] = len(offsets)
    constants["exponent_offsets"] = (ctypes.c_int32 * len(offsets))(*offsets)
    if not spec.has_power_of_two_scale:
        float_scale = float_scale_of(spec)
        constants["candidates"] = float_scale.factor_count * float_scale.offset_count
        constants["float_scale"] = float_scale
    return _structure(Spec, constants)


@functools.cache  # calls that are kept point to the result
def float_scale_of(spec: MXSpec) -> ctypes.Structure:
    """Return the numbers of scales with a significand, as the C++ reads them."""
    constants = float_scale_constants(spec)
    constants["dtype"] = DTYPES.index(spec.scale_dtype) if spec.scale_dtype in DTYPES else _BYTE
    constants["tensor"] = _TENSOR_SCALES.index(constants["tensor"])
    factors, offsets = constants["factors"], constants["code_offsets"]
    constants["factor_count"], constants["offset_count"] = len(factors), len(offsets)
    constants["factors"] = (ctypes.c_float * len(factors))(*factors)
    constants["code_offsets"] = (ctypes.c_int32 * len(offsets))(*offsets)
    return _structure(FloatScale, constants)


def _structure(type: type[ctypes.Structure], constants: Mapping[str, Any]) -> ctypes.Structure:
    """Return a structure with these fields, which keeps those that it points to; others stay zero."""
    structure = type()
    structure.kept = constants
    for name, *_ in type._fields_:
        value = constants.get(name, 0)
        points = isinstance(value, (ctypes.Array, ctypes.Structure))
        setattr(structure, name, ctypes.addressof(value) if points else value)
    return structure
