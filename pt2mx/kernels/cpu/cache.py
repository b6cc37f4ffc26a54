"""Quantization of new keys and values into a cache of codes on the CPU, in C++ (`src/quantize.cpp`)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from torch import Tensor

from pt2mx.kernels.cpu.build import DTYPES, run
from pt2mx.kernels.cpu.calls import RepeatedCalls, StoreCall
from pt2mx.kernels.cpu.quantize import spec_of, supports
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.cache import StoreMX

__all__ = ["store", "store_again"]

#: calls by the arguments of `store_mx`
_CALLS = RepeatedCalls(StoreCall)


def store(call: StoreMX[Tensor], spec: MXSpec) -> bool | None:
    """Return True; None for a cache that is not contiguous, and if a slot does not exist."""
    tensors = call.args[:7]
    if not supports(spec) or 0 in (call.key.numel(), call.value.numel()):
        return None
    if not all(tensor.is_contiguous() for tensor in tensors[2:]):
        return None
    structure, table = StoreCall(), spec_of(spec)
    pairs = (structure.keys, call.key, call.key_data), (structure.values, call.value, call.value_data)
    for one, x, data in pairs:
        one.spec = ctypes.addressof(table)
        one.dtype = DTYPES.index(x.dtype)
        one.outer, one.n, one.inner = x.shape[:-1].numel(), x.shape[-1], 1
        one.block = min(spec.block_size, x.shape[-1])
        one.tensor_scale = 1.0
        one.new_slots, one.all_slots = x.shape[2], data.shape[2]
    _CALLS.add(call.args, structure, table)
    return _run(structure, tensors)


def store_again(args: tuple[object, ...]) -> bool | None:
    """Run a call of `store_mx` with these arguments, if an earlier one had tensors of the same shapes, strides and
    dtypes, and passed its checks. Return True; else None."""
    structure = _CALLS.get(args)
    return None if structure is None else _run(structure, args[:7])  # type: ignore[arg-type]


def _run(structure: ctypes.Structure, tensors: tuple[Tensor, ...]) -> bool | None:
    key, value, key_data, key_scale, value_data, value_scale, slots = tensors
    key, value = key.contiguous(), value.contiguous()
    of_keys, of_values = structure.keys, structure.values
    of_keys.x, of_keys.out, of_keys.scale = key.data_ptr(), key_data.data_ptr(), key_scale.data_ptr()
    of_values.x, of_values.out, of_values.scale = value.data_ptr(), value_data.data_ptr(), value_scale.data_ptr()
    of_keys.slots = of_values.slots = slots.data_ptr()
    return run("pt2mx_store", structure, 2) or None
