"""Attention of a few queries over packed keys and values on the CPU, in C++ (`src/attention.cpp`).

The kernel decodes keys and values in registers, and skips those that the mask hides from every query. Sums are in fp32,
in an order that does not depend on the number of threads.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pt2mx.kernels.constants import has_e8m0_rows
from pt2mx.kernels.cpu.build import DTYPES, load
from pt2mx.kernels.cpu.calls import AttentionCall
from pt2mx.kernels.cpu.linear import TABLE, decoder_of, table_of
from pt2mx.kernels.dequantize_then_matmul import Packed
from pt2mx.spec import MXSpec

__all__ = ["attend"]

#: most queries per head of the keys for which the kernel is faster than a dense matmul, the widest head, and the values
#: of a group
_FEW_QUERIES, _WIDEST, _GROUP = 32, 512, 32


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
    """Return None for many queries, for blocks that are not whole groups, for scales other than E8M0, and if a code is
    no number."""
    (batch, heads, queries, width), (_, key_heads, slots, _) = query.shape, key[0].shape
    group = heads // key_heads
    (decoder, block), (value_decoder, value_block) = decoder_of(spec, width), decoder_of(spec, value_width)
    whole = width % _GROUP == value_width % _GROUP == 0 and max(width, value_width) <= _WIDEST
    fits = TABLE not in (decoder, value_decoder) and whole and group * queries <= _FEW_QUERIES
    if not fits or not has_e8m0_rows(spec) or 0 in (query.numel(), slots):
        return None
    library, parallel_for = load()
    out = query.new_empty(batch, heads, queries, value_width)
    invalid = torch.zeros(1, dtype=torch.int32)
    tensors = [tensor.contiguous() for tensor in (query, *key, *value)]
    hidden = None if mask is None else mask.expand(batch, heads, queries, slots)
    call = AttentionCall(
        table=ctypes.addressof(table_of(spec.element.name)),
        format=decoder,
        dtype=DTYPES.index(query.dtype),
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
        pairs=batch * key_heads,
        out=out.data_ptr(),
        invalid=invalid.data_ptr(),
    )
    for name, tensor in zip(("query", "key", "key_scale", "value", "value_scale"), tensors, strict=True):
        setattr(call, name, tensor.data_ptr())
    if hidden is not None:
        call.mask, strides = hidden.data_ptr(), hidden.stride()
        call.mask_batch, call.mask_head, call.mask_query, call.mask_slot = strides
    if library.pt2mx_attention(ctypes.addressof(call), parallel_for):
        raise RuntimeError("torch_parallel_for failed")
    return None if invalid.item() else out
