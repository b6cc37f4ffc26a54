"""Quantization on the CPU, in C++ (`src/quantize.cpp`): one pass over memory, on torch's threads."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from pt2mx.formats import ELEMENTS
from pt2mx.kernels.constants import spec_constants
from pt2mx.kernels.cpu.build import DTYPES, load
from pt2mx.kernels.cpu.calls import QuantizeCall, Spec
from pt2mx.kernels.cpu.hadamard import rotate
from pt2mx.kernels.packing import group_of, packed_length, resized
from pt2mx.modes import SCALE_MODES
from pt2mx.spec import MXSpec

__all__ = [
    "clip_gradient",
    "dequantize",
    "fake_quantize",
    "quantize",
    "random_bits",
    "rotated_fake_quantize",
    "spec_of",
]

# in the order of the C++ enumerations
_ROUNDINGS = ("even", "half_away", "half_toward_zero", "half_up", "toward_zero", "up", "down", "stochastic")
_QUANTIZE, _DEQUANTIZE, _FAKE_QUANTIZE, _CLIP_GRADIENT = range(4)


def quantize(x: Tensor, spec: MXSpec, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    n = x.shape[spec.axis]
    scale = _empty(resized(x, spec.axis, -(-n // spec.block_size)), torch.uint8)
    data = _empty(resized(x, spec.axis, packed_length(n, spec.element.bits)), torch.uint8)
    _run(_QUANTIZE, x.contiguous(), data, spec, x.dtype, x.shape, scale=scale, seed=seed)
    return scale, data


def dequantize(data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int) -> Tensor:
    y = _empty(resized(data, spec.axis, length), dtype)
    _run(_DEQUANTIZE, data.contiguous(), y, spec, dtype, y.shape, scale=scale.contiguous())
    return y


def fake_quantize(x: Tensor, spec: MXSpec, seed: Tensor | None) -> Tensor:
    y = _empty(x.shape, x.dtype)
    _run(_FAKE_QUANTIZE, x.contiguous(), y, spec, x.dtype, x.shape, seed=seed)
    return y


def rotated_fake_quantize(x: Tensor, size: int, spec: MXSpec, dtype: torch.dtype) -> Tensor:
    y = _empty(x.shape, dtype)
    if dtype != x.dtype and size > 1:  # the fused kernel writes x's dtype
        x, size = rotate(x, size), 1
    _run(_FAKE_QUANTIZE, x.contiguous(), y, spec, x.dtype, x.shape, rotation=size if size > 1 else 0)
    return y


def clip_gradient(grad: Tensor, x: Tensor, spec: MXSpec) -> Tensor | None:
    if grad.shape != x.shape or grad.itemsize not in (2, 4):  # autograd passes x's shape and dtype
        return None
    y = _empty(x.shape, grad.dtype)
    _run(_CLIP_GRADIENT, x.contiguous(), y, spec, x.dtype, x.shape, grad=grad.contiguous())
    return y


def random_bits(seed: Tensor, shape: torch.Size) -> Tensor:
    y = _empty(shape, torch.int32)
    library, parallel_for = load()
    library.pt2mx_random_bits(int(seed), y.data_ptr(), y.numel(), parallel_for)
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
    )
    library, parallel_for = load()
    if rotation:
        failed = library.pt2mx_rotate_fake_quantize(ctypes.addressof(call), rotation, parallel_for)
    else:
        failed = library.pt2mx_run(ctypes.addressof(call), parallel_for)
    if failed:
        raise RuntimeError("torch_parallel_for failed")


def spec_of(spec: MXSpec) -> Spec:
    """Return the numbers of a spec as the C++ reads them, cached."""
    return _spec(spec.element.name, spec.scale_mode, spec.rounding, spec.block_size)


@functools.lru_cache(maxsize=1024)
def _spec(name: str, scale_mode: str, rounding: str, block_size: int) -> Spec:
    element, mode = ELEMENTS[name], SCALE_MODES[scale_mode]
    constants = spec_constants(element, mode, block_size)
    constants["codes_per_group"], constants["bytes_per_group"] = group_of(element.bits)
    constants["rounding"], constants["candidates"] = _ROUNDINGS.index(rounding), len(mode.exponent_offsets)
    constants["exponent_offsets"] = (ctypes.c_int32 * len(mode.exponent_offsets))(*mode.exponent_offsets)
    return Spec(**{field[0]: constants[field[0]] for field in Spec._fields_})
