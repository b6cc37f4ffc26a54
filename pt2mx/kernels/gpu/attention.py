"""Attention of a few queries over packed keys and values on an NVIDIA GPU.

`flash_decoding_kernel` decodes the codes in registers, for up to 8 bfloat16 queries of a head of the keys;
`attention_kernel` is for the others. The programs divide the slots of a cache; each decodes its split once, for all
queries. A second kernel joins their results (flash-decoding: Dao et al., 2023). The kernels do not wait for the device,
can be captured in a CUDA graph, and return the same bits in every run.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.dequantize_then_matmul import Packed
from pt2mx.kernels.gpu.attention_kernel import Elements, Sizes, attend_kernel, join_kernel
from pt2mx.kernels.gpu.flash_decoding_kernel import DecodingSizes, decode_attention_kernel
from pt2mx.kernels.gpu.mma_decode import decode_eight_ptx
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS
from pt2mx.spec import MXSpec

__all__ = ["attend"]

#: most queries per head of the keys for which the kernel is faster than a dense matmul, the widest head that it
#: supports, and the slots that a program decodes at a time
_FEW_QUERIES, _WIDEST, _SLOTS = 16, 256, 128
#: of `flash_decoding_kernel`: queries, warps of a program, and slots that a warp takes at a time. Among 4 and 8 warps
#: of 16, 32 and 64 slots, and 2, 4 and 6 programs, these are within 6% of the fastest for FP8 and INT8 caches of 512
#: slots and more on an H100
_QUERIES_IN_LANES, _WARPS, _SLOTS_OF_WARP = 8, 8, 32
#: programs per multiprocessor. Among 2, 4 and 8 programs, with 32, 64 and 128 slots, these values are within 2% of the
#: fastest for caches of 8,192 slots and more on an H200
_PROGRAMS = 2


def attend(
    query: Tensor,
    key: Packed,
    value: Packed,
    spec: MXSpec,
    value_width: int,
    mask: Tensor | None,
    scale: float | None,
    key_tensor_scale: None = None,
    value_tensor_scale: None = None,
) -> Tensor | None:
    """Return None for many queries, for widths that are not powers of two, and in float32."""
    (batch, heads, queries, width), (_, key_heads, slots, _) = query.shape, key[0].shape
    rows = heads // key_heads * queries
    whole = all(n >= 32 and n & (n - 1) == 0 and n <= _WIDEST for n in (width, value_width))
    fits = whole and spec.block_size % 32 == 0 and spec.element.bits in (4, 6, 8)
    if not fits or rows > _FEW_QUERIES or query.dtype == torch.float32 or 0 in (query.numel(), slots):
        return None
    pairs = batch * key_heads
    converts_fp8 = torch.cuda.get_device_capability(query.device) >= (8, 9)
    uses_lanes = query.dtype == torch.bfloat16 and rows <= _QUERIES_IN_LANES
    uses_lanes &= spec.element.name in FRAGMENTS and (converts_fp8 or not spec.element.name.startswith("fp8"))
    at_a_time = _WARPS * _SLOTS_OF_WARP if uses_lanes else _SLOTS
    blocks = triton.cdiv(slots, at_a_time)
    multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    splits = min(blocks, max(1, _PROGRAMS * multiprocessors // pairs))
    blocks_of_split = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, blocks_of_split)
    acc = query.new_empty((splits, pairs, _FEW_QUERIES, value_width), dtype=torch.float32)
    m_and_l = query.new_empty((2, splits, pairs, _FEW_QUERIES), dtype=torch.float32)
    out = query.new_empty(batch, heads, queries, value_width)
    mask = None if mask is None else mask.expand(batch, heads, queries, slots).view(torch.uint8)
    block, value_block = (min(spec.block_size, n) for n in (width, value_width))
    shape = Sizes(width, value_width, _FEW_QUERIES, _SLOTS, block, value_block, mask is not None)
    tensors = (
        query.contiguous(),
        *(tuple(t.contiguous() for t in packed) for packed in (key, value)),
        query if mask is None else mask,
        (acc, m_and_l),
    )
    sm_scale, strides = width**-0.5 if scale is None else scale, (0, 0, 0, 0) if mask is None else mask.stride()
    with torch.cuda.device_of(query):
        if uses_lanes:
            sizes = rows, queries, key_heads, slots, blocks_of_split * _SLOTS_OF_WARP
            decoding = _decoding_sizes(spec.element, width, value_width, block, value_block, mask is not None)
            decode_attention_kernel[splits, pairs](*tensors, sm_scale, *sizes, strides, decoding, num_warps=_WARPS)
        else:
            sizes = rows, queries, key_heads, slots, blocks_of_split
            elements = _elements(spec.element, converts_fp8)
            attend_kernel[splits, pairs](*tensors, sm_scale, sizes, strides, shape, elements, num_warps=4)
        padded = triton.next_power_of_2(splits)
        join_kernel[pairs, rows]((acc, m_and_l), out, pairs, splits, rows, padded, shape, num_warps=4)
    return out


@functools.cache
def _decoding_sizes(
    element: ElementFormat, width: int, value_width: int, block: int, value_block: int, masked: bool
) -> DecodingSizes:
    tiles = 1 if max(width, value_width) > 128 else _SLOTS_OF_WARP // 16
    ptx = decode_eight_ptx(element)
    return DecodingSizes(width, value_width, _FEW_QUERIES, block, value_block, element.bits, masked, _WARPS, tiles, ptx)


@functools.cache
def _elements(element: ElementFormat, converts_fp8: bool) -> Elements:
    names = ("bits", "mantissa_bits", "bias", "emin", "max_normal", "is_int")
    special, converts = element.has_inf or element.has_nan, converts_fp8 and element.name in ("fp8_e4m3", "fp8_e5m2")
    fields = {name: getattr(element, name) for name in names}
    return Elements(**fields, special=special, converts=converts)
