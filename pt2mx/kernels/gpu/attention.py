"""Attention of a few queries over packed keys and values, or over bfloat16, on an NVIDIA GPU.

`flash_decoding_kernel` decodes codes in registers, for up to 8 bfloat16 queries of a head of the keys;
`attention_kernel` is for the others. The programs divide the slots of a cache; each decodes its split once, for all
queries. The last program of a head joins the results of a few splits, given counters; else a second kernel joins them
(flash-decoding: Dao et al., 2023). The kernels do not wait for the device, can be captured in a CUDA graph, and return
the same bits in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.attention_kernel import Elements, Sizes, attend_kernel, join_kernel
from pt2mx.kernels.gpu.device import aligned, multiprocessors_of, uses_pdl
from pt2mx.kernels.gpu.flash_decoding_kernel import DecodingSizes, decode_attention_kernel
from pt2mx.kernels.gpu.float_scales import ScaleConstants
from pt2mx.kernels.gpu.mma_decode import decode_eight_ptx
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS
from pt2mx.kernels.gpu.quantize import as_integers, scale_constants
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.attention import AttentionMX
    from pt2mx.ops.decoding import DecodingAttention, DecodingAttentionMX

    _Call = AttentionMX[Tensor] | DecodingAttention[Tensor]


#: most queries per head of the keys for which the kernel is faster than a dense matmul, the widest head and the
#: smallest block that it supports, the slots that a program decodes at a time, and the values of each in a tile of
#: smaller blocks than 32
_FEW_QUERIES, _WIDEST, _LEAST_BLOCK, _SLOTS, _TILE = 16, 256, 16, 128, 64
_MOST_PAIRS = 2**16 - 1  # of a sequence and a head of its keys: CUDA's limit of a grid's second dimension
#: of `flash_decoding_kernel`: queries, and warps of a program, each with 32 slots at a time. Among 4 and 8 warps
#: of 16, 32 and 64 slots, and 2, 4 and 6 programs, these are within 6% of the fastest for FP8 and INT8 caches of 512
#: slots and more on an H100
_QUERIES_IN_LANES, _WARPS = 8, 8
#: the most splits that a program joins, the slots up to which there are so few, and the slots up to which a program has
#: 4 warps. Among 2, 4 and 8 warps of 16 and 32 slots, and 2 and 4 programs, these are within 15% of the fastest for 512
#: to 8,192 slots in bfloat16 of 1 to 8 sequences on an H100
_MOST_JOINED, _FEW_SLOTS, _FEWEST_SLOTS = 8, 2048, 512
#: programs per multiprocessor. Among 2, 4 and 8 programs, with 32, 64 and 128 slots, these values are within 2% of the
#: fastest for caches of 8,192 slots and more on an H200
_PROGRAMS = 2


class _Work(NamedTuple):
    """The values that the kernels of a call share. A pair is a sequence and a head of its keys; each of the `splits`
    programs of a pair takes `blocks` blocks of slots. `joined`, `most`: the result and counters, and the most splits
    that the last program of a pair joins, or 0."""

    pairs: int
    rows: int
    splits: int
    blocks: int
    partial: tuple[Tensor, Tensor]
    out: Tensor
    joined: tuple[Tensor, Tensor]
    most: int
    mask: Tensor
    mask_strides: tuple[int, ...]
    sm_scale: float
    use_pdl: bool


def decode(call: DecodingAttentionMX[Tensor], spec: MXSpec) -> Tensor | None:
    """Return None as `attend` does."""
    return attend(call.attention, spec, call.zeros)


def attend(call: AttentionMX[Tensor], spec: MXSpec, zeros: Tensor | None = None) -> Tensor | None:
    """Return None for many queries or sequences, for widths and blocks that are not powers of two, for scales with a
    significand of integers and those of a tensor, and in float32."""
    query, value_width = call.query, call.value_width
    (_, heads, queries, width), (_, key_heads, slots, _) = query.shape, call.key_data.shape
    rows = heads // max(key_heads, 1) * queries
    blocks = min(spec.block_size, width), min(spec.block_size, value_width)
    fits = _fits(query, key_heads, width, value_width) and all(n >= _LEAST_BLOCK and n & (n - 1) == 0 for n in blocks)
    fits &= spec.element.bits in (4, 6, 8) and (spec.has_plain_scale or not spec.element.is_int)
    fits &= call.key_tensor_scale is None and call.value_tensor_scale is None and spec.block_rows == 1
    if not fits or rows > _FEW_QUERIES or query.dtype == torch.float32 or 0 in (query.numel(), slots):
        return None
    converts_fp8 = torch.cuda.get_device_capability(query.device) >= (8, 9)
    uses_lanes = query.dtype == torch.bfloat16 and rows <= _QUERIES_IN_LANES and min(blocks) % 32 == 0
    uses_lanes &= spec.element.name in FRAGMENTS and (converts_fp8 or not spec.element.name.startswith("fp8"))
    keys_and_values = (call.key_data, call.key_scale), (call.value_data, call.value_scale)
    packed = [(aligned(data, 8), as_integers(aligned(scales, 8))) for data, scales in keys_and_values]
    zeros = zeros if _joins(zeros, slots, query.shape[0] * key_heads) else None
    if uses_lanes and spec.has_plain_scale:
        few = slots <= _FEWEST_SLOTS
        sizes = _decoding_sizes(
            spec.element, width, value_width, *blocks, call.mask is not None, zeros is not None, few
        )
        return _decode(call, packed, sizes, zeros)
    work = _work(call, call.key_data, value_width, _SLOTS, zeros)
    scaled = spec.block_size if min(blocks) < 32 else 0
    tiles = (min(width, _TILE), min(value_width, _TILE)) if scaled else blocks
    shape = Sizes(
        width, value_width, _FEW_QUERIES, _SLOTS, *tiles, call.mask is not None, scaled, work.most, work.use_pdl
    )
    tensors = query.contiguous(), *packed, work.mask, work.partial, work.joined
    sizes_of_call = rows, queries, key_heads, slots, work.blocks
    with torch.cuda.device_of(query):
        scales = None if spec.has_plain_scale else scale_constants(spec, False)
        shifts = query.dtype == torch.float16 and not scaled
        elements = _elements(spec.element, scales, converts_fp8, shifts)
        options = {"num_warps": 4, "launch_pdl": work.use_pdl}
        grid = work.splits, work.pairs
        attend_kernel[grid](*tensors, work.sm_scale, sizes_of_call, work.mask_strides, shape, elements, **options)
        if zeros is None:
            _join(work, shape)
    return work.out


def attend_dense(call: DecodingAttention[Tensor]) -> Tensor | None:
    """Return None for more than 8 queries of a head of the keys, for many sequences, for widths that are not powers of
    two, and for other dtypes than bfloat16."""
    query, key, value = call.query, call.keys, call.values
    (_, heads, queries, width), (_, key_heads, slots, value_width) = query.shape, value.shape
    rows, tensors = heads // key_heads * queries, (query, key, value)
    fits = _fits(query, key_heads, width, value_width) and rows <= _QUERIES_IN_LANES and 0 not in (query.numel(), slots)
    if not fits or any(tensor.dtype != torch.bfloat16 for tensor in tensors):
        return None
    zeros = call.zeros if _joins(call.zeros, slots, query.shape[0] * key_heads) else None
    sizes = _dense_sizes(width, value_width, call.mask is not None, zeros is not None, slots <= _FEWEST_SLOTS)
    cache = [(aligned(tensor).view(torch.uint8),) * 2 for tensor in (key, value)]  # as codes without scales
    return _decode(call, cache, sizes, zeros)


def _joins(zeros: Tensor | None, slots: int, pairs: int) -> bool:
    """Return whether so few programs of a pair keep the multiprocessors busy that the last one joins their results, and
    each pair has a counter."""
    if zeros is None or pairs > len(zeros):
        return False
    return slots <= _FEW_SLOTS or _PROGRAMS * multiprocessors_of(zeros.device) <= _MOST_JOINED * pairs


def _fits(query: Tensor, key_heads: int, *widths: int) -> bool:
    return query.shape[0] * key_heads <= _MOST_PAIRS and all(
        n >= 32 and n & (n - 1) == 0 and n <= _WIDEST for n in widths
    )


def _decode(call: _Call, cache: Sequence[tuple[Tensor, ...]], sizes: DecodingSizes, zeros: Tensor | None) -> Tensor:
    """Attend with `flash_decoding_kernel`; with `zeros`, its last programs join the splits."""
    query, slots_of_warp = call.query, 16 * sizes.TILES
    _, key_heads, slots, _ = cache[0][0].shape
    work = _work(call, cache[0][0], sizes.VALUE_DIM, slots_of_warp * sizes.WARPS, zeros)
    sizes = sizes._replace(JOINED=work.most, use_pdl=work.use_pdl)
    tensors = aligned(query, 4), *cache, work.mask, work.partial, work.joined
    sizes_of_call = work.rows, query.shape[2], key_heads, slots, work.blocks * slots_of_warp
    options = {"num_warps": sizes.WARPS, "launch_pdl": work.use_pdl}
    with torch.cuda.device_of(query):
        grid = work.splits, work.pairs
        decode_attention_kernel[grid](*tensors, work.sm_scale, *sizes_of_call, work.mask_strides, sizes, **options)
        if zeros is None:
            _join(work, Sizes(sizes.HEAD_DIM, sizes.VALUE_DIM, _FEW_QUERIES, _SLOTS, 0, 0, sizes.MASKED))
    return work.out


def _work(call: _Call, keys: Tensor, value_width: int, at_a_time: int, zeros: Tensor | None) -> _Work:
    """Divide the slots of keys among the programs of a pair, each for blocks of `at_a_time` slots; with `zeros` among
    as many as the last one joins."""
    query, mask = call.query, call.mask
    (batch, heads, queries, width), (_, key_heads, slots, _) = query.shape, keys.shape
    pairs, blocks = batch * key_heads, triton.cdiv(slots, at_a_time)
    of_split = triton.cdiv(blocks, min(blocks, max(1, _PROGRAMS * multiprocessors_of(query.device) // pairs)))
    of_split = of_split if zeros is None else max(of_split, triton.cdiv(blocks, _MOST_JOINED))
    splits = triton.cdiv(blocks, of_split)
    acc = query.new_empty((splits, pairs, _FEW_QUERIES, value_width), dtype=torch.float32)
    m_and_l = query.new_empty((2, splits, pairs, _FEW_QUERIES), dtype=torch.float32)
    out = query.new_empty(batch, heads, queries, value_width)
    mask = None if mask is None else mask.expand(batch, heads, queries, slots).view(torch.uint8)
    strides = (0, 0, 0, 0) if mask is None else mask.stride()
    sm_scale = width**-0.5 if call.scale is None else call.scale
    rows = heads // key_heads * queries
    shown = query if mask is None else mask
    joined, most = (out, out if zeros is None else zeros), 0 if zeros is None else _MOST_JOINED
    use_pdl = uses_pdl(query.device)
    return _Work(pairs, rows, splits, of_split, (acc, m_and_l), out, joined, most, shown, strides, sm_scale, use_pdl)


def _join(work: _Work, shape: Sizes) -> None:
    padded = triton.next_power_of_2(work.splits)
    join_kernel[work.pairs, work.rows](
        work.partial, work.out, work.pairs, work.splits, work.rows, padded, shape, num_warps=4
    )


@functools.cache
def _decoding_sizes(
    element: ElementFormat,
    width: int,
    value_width: int,
    block: int,
    value_block: int,
    masked: bool,
    joins: bool,
    few: bool,
) -> DecodingSizes:
    """Return the sizes over codes; `few`: for few slots."""
    warps, tiles = 4 if joins and few else _WARPS, 1 if joins or max(width, value_width) > 128 else 2
    ptx = decode_eight_ptx(element)
    return DecodingSizes(width, value_width, _FEW_QUERIES, block, value_block, element.bits, masked, warps, tiles, ptx)


@functools.cache
def _dense_sizes(width: int, value_width: int, masked: bool, joins: bool, few: bool) -> DecodingSizes:
    warps, tiles = 4 if few else 8, 1 if joins else 2
    return DecodingSizes(width, value_width, _FEW_QUERIES, width, value_width, 16, masked, warps, tiles)


@functools.cache
def _elements(element: ElementFormat, scales: ScaleConstants | None, converts_fp8: bool, shifts: bool) -> Elements:
    names = ("bits", "mantissa_bits", "bias", "emin", "max_normal", "is_int")
    special, converts = element.has_inf or element.has_nan, converts_fp8 and element.name in ("fp8_e4m3", "fp8_e5m2")
    fields = {name: getattr(element, name) for name in names}
    # the exponent of its largest value in the kernel, where integers are whole numbers
    shift = (element.mantissa_bits if element.is_int else element.emax) if shifts else 0
    return Elements(**fields, special=special, converts=converts, shift=shift, scale=scales)
