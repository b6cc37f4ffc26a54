"""Attention of a few queries over packed keys and values on the CPU, in C++ (`src/attention.cpp`).

The kernel decodes keys and values in registers, and skips those that the mask hides from every query. Sums are in fp32,
in an order that does not depend on the number of threads. With AMX, keys and values become bfloat16, which is exact,
and queries and softmax weights are sums of bfloat16 numbers.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from pt2mx.kernels.constants import has_e8m0_rows
from pt2mx.kernels.cpu.build import DTYPES, load
from pt2mx.kernels.cpu.calls import AttentionCall, RepeatedCalls
from pt2mx.kernels.cpu.decoders import TABLE, decoder_of, table_of
from pt2mx.kernels.cpu.linear import AMX, isa_for
from pt2mx.kernels.cpu.quantize import float_scale_of, supports
from pt2mx.kernels.dequantize_then_matmul import Packed
from pt2mx.spec import MXSpec

__all__ = ["attend", "attend_again", "call_of", "is_computed"]

#: most queries per head of the keys for which fp32 vectors and AMX are faster than a dense matmul
_FEW_QUERIES, _FEW_FOR_AMX = 32, 64
#: the widest head, and the values of a group
_WIDEST, _GROUP = 512, 32
#: calls by the arguments of `attention_mx`
_CALLS: RepeatedCalls[AttentionCall] = RepeatedCalls(AttentionCall)


def attend(
    query: Tensor,
    key: Packed,
    value: Packed,
    spec: MXSpec,
    value_width: int,
    mask: Tensor | None,
    scale: float | None,
    key_tensor_scale: Tensor | None = None,
    value_tensor_scale: Tensor | None = None,
) -> Tensor | None:
    """Return None for many queries, for blocks that are not whole groups, and if a code is no number."""
    if not (supports(spec, key_tensor_scale) and supports(spec, value_tensor_scale)):
        return None
    call = call_of(query, key, value, spec, value_width, mask, scale)
    if call is None:
        return None
    tensors = query, *key, *value
    modes = spec.element.name, spec.block_size, value_width
    scale_format = None if has_e8m0_rows(spec) else spec.scale_format.name
    if key_tensor_scale is None and value_tensor_scale is None:
        _CALLS.add((*tensors, *modes, mask, scale, scale_format, None, None), call)
    else:
        call.key_tensor_scale = 1.0 if key_tensor_scale is None else float(key_tensor_scale)
        call.value_tensor_scale = 1.0 if value_tensor_scale is None else float(value_tensor_scale)
    return _run(call, tensors, mask)


def attend_again(args: tuple[object, ...]) -> Tensor | None:
    """Return the result of a call of `attention_mx` with these arguments, if an earlier one had tensors of the same
    shapes, strides and dtypes, and passed its checks; else None."""
    call = _CALLS.get(args)
    return None if call is None else _run(call, args[:5], args[8])  # type: ignore[arg-type]


def call_of(
    query: Tensor, key: Packed, value: Packed, spec: MXSpec, value_width: int, mask: Tensor | None, scale: float | None
) -> AttentionCall | None:
    """Return the call but for its pointers; None for one that the kernel does not support."""
    (batch, heads, queries, width), (_, key_heads, slots, _) = query.shape, key[0].shape
    group = heads // max(key_heads, 1)
    (decoder, block), (value_decoder, value_block) = decoder_of(spec, width), decoder_of(spec, value_width)
    whole = width % _GROUP == value_width % _GROUP == 0 and max(width, value_width) <= _WIDEST
    isa = isa_for(spec, width) & AMX
    few = group * queries <= (_FEW_FOR_AMX if isa else _FEW_QUERIES)
    fits = TABLE not in (decoder, value_decoder) and whole and few
    if not fits or 0 in (query.numel(), slots):
        return None
    call = AttentionCall(
        table=ctypes.addressof(table_of(spec.element.name)),
        format=decoder,
        dtype=DTYPES.index(query.dtype),
        isa=isa,
        heads=key_heads,
        queries=queries,
        group=group,
        slots=slots,
        width=width,
        value_width=value_width,
        block=block,
        value_block=value_block,
        key_bytes=key[0].shape[3],
        key_blocks=key[1].shape[3],
        value_bytes=value[0].shape[3],
        value_blocks=value[1].shape[3],
        factor=width**-0.5 if scale is None else scale,
        key_tensor_scale=1.0,
        value_tensor_scale=1.0,
        pairs=batch * key_heads,
    )
    if not spec.scale_format.is_power_of_two:
        call.float_scale = ctypes.pointer(float_scale_of(spec.element.name, spec.scale_format.name, spec.scale_mode))
    if mask is not None:
        strides = mask.expand(batch, heads, queries, slots).stride()
        call.mask_batch, call.mask_head, call.mask_query, call.mask_slot = strides
    return call


def _run(call: AttentionCall, tensors: tuple[Tensor, ...], mask: Tensor | None) -> Tensor | None:
    query, key, key_scale, value, value_scale = (tensor.contiguous() for tensor in tensors)
    out = query.new_empty((*query.shape[:3], call.value_width))
    call.query, call.out = query.data_ptr(), out.data_ptr()
    call.key, call.key_scale, call.value = key.data_ptr(), key_scale.data_ptr(), value.data_ptr()
    call.value_scale, call.mask = value_scale.data_ptr(), None if mask is None else mask.data_ptr()
    return out if is_computed(call) else None


def is_computed(call: AttentionCall) -> bool:
    """Run a call; return False for codes that are no numbers."""
    library, parallel_for = load()
    if library.pt2mx_attention(ctypes.addressof(call), parallel_for):
        raise RuntimeError("torch_parallel_for failed")
    return not call.invalid
