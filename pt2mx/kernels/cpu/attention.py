"""Attention of a few queries over packed keys and values, or over floats, on the CPU, in C++ (`src/attention.cpp`).

The kernel decodes keys and values in registers, and skips those that the mask hides from every query. Sums are in fp32,
in an order that does not depend on the number of threads. With AMX, keys and values become bfloat16, which is exact,
and queries and softmax weights are sums of bfloat16 numbers.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pt2mx.kernels.cpu.build import DTYPES, run
from pt2mx.kernels.cpu.calls import AttentionCall
from pt2mx.kernels.cpu.linear import AMX, isa_for
from pt2mx.kernels.cpu.quantize import TABLE, decoder_of, float_scale_of, supports, table_of
from pt2mx.kernels.cpu.repeated import keep
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.attention import AttentionMX
    from pt2mx.ops.decoding import DecodingAttention

#: (codes, scales) of keys or values: (B, heads, L, bytes) uint8 and (B, heads, L, blocks)
Packed = tuple[Tensor, Tensor]


#: most queries per head of the keys for which fp32 vectors and AMX are faster than a dense matmul
_FEW_QUERIES, _FEW_FOR_AMX = 32, 64
#: the widest head, and the values of a group
_WIDEST, _GROUP = 512, 32


def attend(call: AttentionMX[Tensor], spec: MXSpec) -> Tensor | None:
    """Return None for many queries, for blocks that are not whole groups, and if a code is no number."""
    of_keys, of_values = call.key_tensor_scale, call.value_tensor_scale
    if not (supports(spec, of_keys) and supports(spec, of_values)):
        return None
    key, value = (call.key_data, call.key_scale), (call.value_data, call.value_scale)
    structure = call_of(call.query, key, value, spec, call.value_width, call.mask, call.scale)
    if structure is None:
        return None
    if of_keys is not None:
        structure.key_tensor_scale = float(of_keys)
    if of_values is not None:
        structure.value_tensor_scale = float(of_values)
    out = _run(structure, call.query, *key, *value, call.mask)
    if out is not None and of_keys is None and of_values is None:
        keep(call, functools.partial(_again, structure))
    return out


def _again(structure: ctypes.Structure, *args: Any) -> Any:
    """Run `attention_mx` again; the mask is its ninth argument."""
    query, key, key_scale, value, value_scale = args[:5]
    mask = args[8] if len(args) > 8 else None
    out = _run(structure, query, key, key_scale, value, value_scale, mask)
    return NotImplemented if out is None else out


def call_of(
    query: Tensor, key: Packed, value: Packed, spec: MXSpec, value_width: int, mask: Tensor | None, scale: float | None
) -> ctypes.Structure | None:
    """Return the call but for its pointers; None for one that the kernel does not support."""
    width = query.shape[3]
    (decoder, block), (value_decoder, value_block) = decoder_of(spec, width), decoder_of(spec, value_width)
    isa = isa_for(spec, width) & AMX
    call = _shaped(query, key[0], value_width, mask, scale, _FEW_FOR_AMX if isa else _FEW_QUERIES)
    if call is None or TABLE in (decoder, value_decoder):
        return None
    call.table, call.format, call.isa = ctypes.addressof(table_of(spec.element.name)), decoder, isa
    call.block, call.value_block = block, value_block
    call.key_bytes, call.key_blocks = key[0].shape[3], key[1].shape[3]
    call.value_bytes, call.value_blocks = value[0].shape[3], value[1].shape[3]
    if not spec.has_power_of_two_scale:
        call.float_scale = ctypes.addressof(float_scale_of(spec))
    return call


def dense_call_of(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> ctypes.Structure | None:
    """Return the call over keys and values in the dtype of the query, but for its pointers and its slots, which are one
    in the shapes; None for one that the kernel does not support."""
    call = _shaped(query, keys, values.shape[3], mask, scale, _FEW_QUERIES)
    if call is not None:
        call.block = call.value_block = _GROUP
        call.key_bytes, call.value_bytes = (tensor.shape[3] * tensor.element_size() for tensor in (keys, values))
    return call


def supports_dense(queries: int, width: int, value_width: int) -> bool:
    """Return whether the kernel takes heads of the keys that have so many queries, of such widths."""
    return _fits(queries, width, value_width, _FEW_QUERIES)


def _fits(queries: int, width: int, value_width: int, most: int) -> bool:
    return queries <= most and width % _GROUP == value_width % _GROUP == 0 and max(width, value_width) <= _WIDEST


def _shaped(
    query: Tensor, key: Tensor, value_width: int, mask: Tensor | None, scale: float | None, most: int
) -> ctypes.Structure | None:
    """Return a call of such shapes, with at most `most` queries of a head of the keys; None for unsupported ones."""
    (batch, heads, queries, width), (_, key_heads, slots, _) = query.shape, key.shape
    group = heads // max(key_heads, 1)
    if not _fits(group * queries, width, value_width, most) or 0 in (query.numel(), slots, value_width):
        return None
    call = AttentionCall(
        dtype=DTYPES.index(query.dtype),
        heads=key_heads,
        queries=queries,
        group=group,
        slots=slots,
        width=width,
        value_width=value_width,
        factor=width**-0.5 if scale is None else scale,
        key_tensor_scale=1.0,
        value_tensor_scale=1.0,
        pairs=batch * key_heads,
    )
    if mask is not None:
        strides = mask.expand(batch, heads, queries, slots).stride()
        call.mask_batch, call.mask_head, call.mask_query, call.mask_slot = strides
    return call


def attend_dense(call: DecodingAttention[Tensor]) -> Tensor | None:
    """Return None for many queries, and for widths that are not whole groups."""
    query, keys, values, mask = call.query, call.keys, call.values, call.mask
    if 0 in keys.shape:
        return None
    # a new mask: one with a single element is contiguous with any stride of its slots
    mask_of_slot = None if mask is None else mask.new_empty((*mask.shape[:3], 1))
    structure = dense_call_of(query, keys[:, :, :1], values[:, :, :1], mask_of_slot, call.scale)
    if structure is None:
        return None
    slots = keys.shape[2]
    out = query.new_empty((*query.shape[:3], values.shape[3]))
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    pointers = [query.data_ptr(), keys.data_ptr(), values.data_ptr(), None, out.data_ptr()]
    if mask is not None:
        mask = mask.expand(*mask.shape[:3], slots).contiguous()
        pointers[3] = mask.data_ptr()
    run("pt2mx_decoding_attention_of", structure, slots, *pointers)
    return out


def _run(
    structure: ctypes.Structure,
    query: Tensor,
    key: Tensor,
    key_scale: Tensor,
    value: Tensor,
    value_scale: Tensor,
    mask: Tensor | None,
) -> Tensor | None:
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    key_scale, value_scale = key_scale.contiguous(), value_scale.contiguous()
    call = AttentionCall.from_buffer_copy(structure)
    out = query.new_empty((*query.shape[:3], call.value_width))
    call.query, call.out = query.data_ptr(), out.data_ptr()
    call.key, call.key_scale, call.value = key.data_ptr(), key_scale.data_ptr(), value.data_ptr()
    call.value_scale = value_scale.data_ptr()
    call.mask = None if mask is None else mask.data_ptr()
    return out if is_computed(call) else None


def is_computed(call: ctypes.Structure) -> bool:
    """Run a call; return False for codes that are no numbers."""
    run("pt2mx_attention", call)
    return not call.invalid
