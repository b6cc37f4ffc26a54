"""Attention of a few queries over packed keys and values on an NVIDIA GPU, in Triton (`attention_kernel`).

The slots of a cache are shared out among programs, each of which decodes its part once for all queries that read it;
a second kernel joins what they found (flash-decoding: Dao et al., 2023). Neither waits for the device, both can be
captured in a CUDA graph, and give the same bits in every run.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.dequantize_then_attend import Packed
from pt2mx.kernels.gpu.attention_kernel import Elements, attend_kernel, join_kernel
from pt2mx.spec import MXSpec

__all__ = ["attend"]

#: queries of a head of the keys up to which it is faster than a dense product, the widest head that it takes, and the
#: slots that a program decodes at a time
_FEW_QUERIES, _WIDEST, _SLOTS = 16, 256, 128
#: programs for each multiprocessor; of 2, 4 and 8, with 32, 64 and 128 slots, these are within 2% of the fastest for
#: caches of 8,192 slots and more on an H200
_PROGRAMS = 2


def attend(
    query: Tensor, key: Packed, value: Packed, spec: MXSpec, value_width: int, mask: Tensor | None, scale: float | None
) -> Tensor | None:
    """None for many queries, for widths that are no powers of two, and in float32."""
    (batch, heads, queries, width), (_, key_heads, slots, _) = query.shape, key[0].shape
    rows = heads // key_heads * queries
    whole = all(n >= 32 and n & (n - 1) == 0 and n <= _WIDEST for n in (width, value_width))
    fits = whole and spec.block_size % 32 == 0 and spec.element.bits in (4, 6, 8)
    if not fits or rows > _FEW_QUERIES or query.dtype == torch.float32 or 0 in (query.numel(), slots):
        return None
    pairs = batch * key_heads
    blocks = triton.cdiv(slots, _SLOTS)
    multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    parts = min(blocks, max(1, _PROGRAMS * multiprocessors // pairs))
    blocks_of_part = triton.cdiv(blocks, parts)
    parts = triton.cdiv(blocks, blocks_of_part)
    sums = query.new_empty((parts, pairs, _FEW_QUERIES, value_width), dtype=torch.float32)
    limits = query.new_empty((2, parts, pairs, _FEW_QUERIES), dtype=torch.float32)  # largest scores, sums of weights
    out = query.new_empty(batch, heads, queries, value_width)
    seen = query if mask is None else mask.expand(batch, heads, queries, slots).view(torch.uint8)
    strides = (0, 0, 0, 0) if mask is None else seen.stride()
    tensors = query.contiguous(), *(tensor.contiguous() for tensor in (*key, *value))
    factor = width**-0.5 if scale is None else scale
    sizes = rows, queries, key_heads, slots, blocks_of_part
    shape = {"VALUE_WIDTH": value_width, "ROWS": _FEW_QUERIES}
    with torch.cuda.device_of(query):
        attend_kernel[parts, pairs](
            *(*tensors, seen, sums, limits),
            *(factor, *sizes, *strides),
            WIDTH=width,
            SLOTS=_SLOTS,
            BLOCK=min(spec.block_size, width),
            VALUE_BLOCK=min(spec.block_size, value_width),
            MASKED=mask is not None,
            C=_elements(spec.element, torch.cuda.get_device_capability(query.device) >= (8, 9)),
            **shape,
            num_warps=4,
        )
        padded = triton.next_power_of_2(parts)
        join_kernel[pairs, rows](sums, limits, out, pairs, parts, rows, PARTS=padded, **shape, num_warps=4)
    return out


@functools.cache
def _elements(element: ElementFormat, converts_fp8: bool) -> Elements:
    names = ("bits", "mantissa_bits", "bias", "emin", "max_normal", "is_int")
    special, converts = element.has_inf or element.has_nan, converts_fp8 and element.name in ("fp8_e4m3", "fp8_e5m2")
    fields = {name: getattr(element, name) for name in names}
    return Elements(**fields, special=special, converts=converts)
