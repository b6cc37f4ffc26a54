"""Quantization on the CPU, in C++ (`src/quantize.cpp`): one pass over memory, on torch's threads.

The definition quantizes blocks of several rows, other widths of E8M0's exponent, and tensor scales near the limits of
float32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.formats import ELEMENTS
from pt2mx.kernels.constants import float_scale_constants, spec_constants
from pt2mx.kernels.cpu.build import DTYPES, load, run
from pt2mx.kernels.cpu.calls import FloatScale, QuantizeCall, Spec
from pt2mx.kernels.cpu.decoders import decoder_of, table_of
from pt2mx.kernels.cpu.hadamard import rotate
from pt2mx.kernels.packing import group_of, packed_length, resized
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS, SCALE_MODES
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.hadamard import RotatedFakeQuantize
    from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize
    from pt2mx.ops.stochastic import RandomBits

__all__ = [
    "clip_gradient",
    "dequantize",
    "fake_quantize",
    "quantize",
    "random_bits",
    "rotated_fake_quantize",
    "scales",
    "spec_of",
]

# in the order of the C++ enumerations
_BYTE, _TENSOR_SCALES = len(DTYPES), ("", "factor", "divisor")
_QUANTIZE, _DEQUANTIZE, _FAKE_QUANTIZE, _CLIP_GRADIENT = range(4)


#: the range of tensor scales for which no product with a block's scale and a power of two of a decoder overflows
_TENSOR_SCALE_RANGE = 2.0**-100, 2.0**100


def quantize(call: Quantize[Tensor], spec: MXSpec) -> tuple[Tensor, Tensor] | None:
    if not supports(spec, call.tensor_scale):
        return None
    return _quantize(call.x, spec, call.seed, call.tensor_scale)


def scales(x: Tensor, spec: MXSpec, tensor_scale: Tensor | None = None) -> Tensor | None:
    if spec.rounding == "stochastic" or x.dtype not in DTYPES or not supports(spec, tensor_scale):
        return None
    return _quantize(x, spec, None, tensor_scale)[0]  # the codes are not used: another kernel would save little


def _quantize(x: Tensor, spec: MXSpec, seed: Tensor | None, tensor_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    n = x.shape[spec.axis]
    scale = _empty(resized(x, spec.axis, -(-n // spec.block_size)), spec.scale_format.dtype)
    data = _empty(resized(x, spec.axis, packed_length(n, spec.element.bits)), torch.uint8)
    _run(_QUANTIZE, x.contiguous(), data, spec, x.dtype, x.shape, tensor_scale, scale=scale, seed=seed)
    return scale, data


def dequantize(call: Dequantize[Tensor], spec: MXSpec, length: int) -> Tensor | None:
    if not supports(spec, call.tensor_scale):
        return None
    y = _empty(resized(call.codes, spec.axis, length), call.dtype)
    codes, scale = call.codes.contiguous(), call.scale.contiguous()
    _run(_DEQUANTIZE, codes, y, spec, call.dtype, y.shape, call.tensor_scale, scale=scale)
    return y


def fake_quantize(call: FakeQuantize[Tensor], spec: MXSpec) -> Tensor | None:
    x = call.x
    if not supports(spec, call.tensor_scale):
        return None
    y = _empty(x.shape, x.dtype)
    _run(_FAKE_QUANTIZE, x.contiguous(), y, spec, x.dtype, x.shape, call.tensor_scale, seed=call.seed)
    return y


def rotated_fake_quantize(call: RotatedFakeQuantize[Tensor], spec: MXSpec, dtype: torch.dtype) -> Tensor:
    x, size, y = call.x, call.size, _empty(call.x.shape, dtype)
    if dtype != x.dtype and size > 1:  # the fused kernel writes x's dtype
        x, size = rotate(x, size), 1
    _run(_FAKE_QUANTIZE, x.contiguous(), y, spec, x.dtype, x.shape, rotation=size if size > 1 else 0)
    return y


def clip_gradient(call: ClipGradient[Tensor], spec: MXSpec) -> Tensor | None:
    grad, x = call.grad, call.x
    if grad.shape != x.shape or grad.itemsize not in (2, 4):  # autograd passes x's shape and dtype
        return None
    if not supports(spec, call.tensor_scale):
        return None
    y = _empty(x.shape, grad.dtype)
    _run(_CLIP_GRADIENT, x.contiguous(), y, spec, x.dtype, x.shape, call.tensor_scale, grad=grad.contiguous())
    return y


def random_bits(call: RandomBits[Tensor]) -> Tensor:
    y = _empty(torch.Size(call.size), torch.int32)
    library, parallel_for = load()
    library.pt2mx_random_bits(int(call.seed), y.data_ptr(), y.numel(), parallel_for)
    return y


def _empty(shape: list[int] | torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _run(
    operation: int,
    x: Tensor,
    out: Tensor,
    spec: MXSpec,
    dtype: torch.dtype,
    shape: torch.Size,
    tensor_scale: Tensor | None = None,
    scale: Tensor | None = None,
    grad: Tensor | None = None,
    seed: Tensor | None = None,
    rotation: int = 0,
) -> None:
    """Run an operation of the contiguous `x`, `grad` and `scale`, which writes `out` (and `scale`). The values have
    this shape and dtype. `rotation`: the size of the blocks of x that are rotated first, along the last dimension."""
    n = shape[spec.axis]
    if 0 in shape:
        return
    table = spec_of(spec)
    call = QuantizeCall(
        spec=ctypes.addressof(table),
        operation=operation,
        dtype=DTYPES.index(dtype),
        out_dtype=DTYPES.index(out.dtype) if out.dtype in DTYPES else 0,
        grad_bytes=0 if grad is None else grad.itemsize,
        outer=shape[: spec.axis].numel(),
        n=n,
        inner=shape[spec.axis + 1 :].numel(),
        block=min(spec.block_size, n),
        x=x.data_ptr(),
        grad=None if grad is None else grad.data_ptr(),
        out=out.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        seed=0 if seed is None else int(seed),
        tensor_scale=1.0 if tensor_scale is None else float(tensor_scale),
    )
    if operation == _DEQUANTIZE:
        call.format, _ = decoder_of(spec, n)
        call.table = ctypes.addressof(table_of(spec.element.name))
    if rotation:
        run("pt2mx_rotate_fake_quantize", call, rotation)
    else:
        run("pt2mx_run", call)


def supports(spec: MXSpec, tensor_scale: Tensor | None = None) -> bool:
    """Return whether the C++ kernels support the scales of a spec."""
    widths = (spec.scale_exp_bits, spec.scale_sig_bits) == (8, 0)
    least, most = _TENSOR_SCALE_RANGE
    return widths and spec.block_rows == 1 and (tensor_scale is None or least <= float(tensor_scale) <= most)


def spec_of(spec: MXSpec) -> ctypes.Structure:
    """Return the numbers of a spec as the C++ reads them, cached."""
    return _spec(spec.element.name, spec.scale_format.name, spec.scale_mode, spec.rounding, spec.block_size)


@functools.lru_cache(maxsize=1024)
def _spec(name: str, scale_format: str, scale_mode: str, rounding: str, block_size: int) -> ctypes.Structure:
    element, scale = ELEMENTS[name], SCALE_FORMATS[scale_format]
    mode = SCALE_MODES[scale_mode if scale.is_power_of_two else "floor"]
    constants = spec_constants(element, mode, block_size)
    constants["codes_per_group"], constants["bytes_per_group"] = group_of(element.bits)
    constants["rounding"], constants["candidates"] = list(ROUNDINGS).index(rounding), len(mode.exponent_offsets)
    constants["exponent_offsets"] = (ctypes.c_int32 * len(mode.exponent_offsets))(*mode.exponent_offsets)
    if not scale.is_power_of_two:
        float_scale = float_scale_of(name, scale_format, scale_mode)
        constants["candidates"] = float_scale.factor_count * float_scale.offset_count
        constants["searches"] = constants["candidates"] > 1
        constants["float_scale"] = float_scale
    return _structure(Spec, constants)


@functools.cache
def float_scale_of(name: str, scale_format: str, scale_mode: str) -> ctypes.Structure:
    """Return the numbers of a scale format with a significand, for an element and mode, as the C++ reads them."""
    scale, mode = SCALE_FORMATS[scale_format], FLOAT_SCALE_MODES[scale_mode]
    constants = float_scale_constants(ELEMENTS[name], scale, mode)
    constants["dtype"] = DTYPES.index(scale.dtype) if scale.dtype in DTYPES else _BYTE
    constants["tensor"] = _TENSOR_SCALES.index(scale.tensor)
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
