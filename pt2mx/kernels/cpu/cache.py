"""Quantization of new keys and values into a cache of codes on the CPU, in C++ (`src/quantize.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pt2mx.kernels.cpu.build import DTYPES, run
from pt2mx.kernels.cpu.calls import StoreCall
from pt2mx.kernels.cpu.quantize import spec_of, supports
from pt2mx.kernels.cpu.repeated import keep
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.cache import StoreMX


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
    structure.table = table  # the structure points into the table
    is_stored = _run(structure, *tensors)
    if is_stored:
        keep(call, functools.partial(_again, structure))
    return is_stored or None


def _again(structure: ctypes.Structure, *args: Any) -> Any:
    return None if _run(structure, *args[:7]) else NotImplemented


def _run(
    structure: ctypes.Structure,
    key: Tensor,
    value: Tensor,
    key_data: Tensor,
    key_scale: Tensor,
    value_data: Tensor,
    value_scale: Tensor,
    slots: Tensor,
) -> bool:
    key, value = key.contiguous(), value.contiguous()
    call = StoreCall.from_buffer_copy(structure)
    of_keys, of_values = call.keys, call.values
    of_keys.x, of_keys.out, of_keys.scale = key.data_ptr(), key_data.data_ptr(), key_scale.data_ptr()
    of_values.x, of_values.out, of_values.scale = value.data_ptr(), value_data.data_ptr(), value_scale.data_ptr()
    of_keys.slots = of_values.slots = slots.data_ptr()
    return run("pt2mx_store", call, 2)
