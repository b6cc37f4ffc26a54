"""RoPE of a decoder's new queries and keys, and the write of its cache, in bfloat16 or as codes, on an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from pt2mx.kernels.gpu.quantize import Tile, as_integers, constants_of, packs
from pt2mx.kernels.gpu.rope_kernel import rotate_and_store_kernel, rotate_quantize_and_store_kernel
from pt2mx.kernels.gpu.tiles import Constants
from pt2mx.kernels.packing import group_of
from pt2mx.spec import MXSpec

__all__ = ["rotate_and_store", "rotate_quantize_and_store"]


def rotate_and_store(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, cos: Tensor, sin: Tensor
) -> Tensor | None:
    """Return None for widths that are not powers of two, and for a cache that is not contiguous."""
    if not _fits(query, key, value, (keys, values)):
        return None
    widths = query.shape[3], value.shape[3]
    return _run(rotate_and_store_kernel, (query, key, value), (keys, values), slots, (cos, sin), *widths)


def rotate_quantize_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_data: Tensor,
    key_scale: Tensor,
    value_data: Tensor,
    value_scale: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    spec: MXSpec,
) -> Tensor | None:
    """Return None for widths and blocks that are not powers of two, for codes of other sizes than 4, 6 and 8 bits, and
    for a cache that is not contiguous."""
    cache = key_data, key_scale, value_data, value_scale
    constants = [_constants(spec, tensor.shape[3]) for tensor in (key, value)]
    if not _fits(query, key, value, cache) or None in constants:
        return None
    stored = key_data, as_integers(key_scale), value_data, as_integers(value_scale)
    widths = query.shape[3], value.shape[3]
    return _run(rotate_quantize_and_store_kernel, (query, key, value), stored, slots, (cos, sin), *widths, *constants)


def _fits(query: Tensor, key: Tensor, value: Tensor, cache: tuple[Tensor, ...]) -> bool:
    whole = all(n >= 16 and n & (n - 1) == 0 for n in (key.shape[3], value.shape[3]))
    return whole and all(tensor.is_contiguous() for tensor in cache) and query.numel() > 0


def _constants(spec: MXSpec, width: int) -> Constants | None:
    """Return the compile-time values of a row of `width` values; None for a row that is no tile of whole blocks."""
    block = min(spec.block_size, width)
    if block & (block - 1) or not packs(spec, width):
        return None
    return constants_of(spec, group_of(spec.element.bits), width, 1, False, Tile(width, 1))


def _run(
    kernel: triton.JITFunction,
    news: tuple[Tensor, ...],
    cache: tuple[Tensor, ...],
    slots: Tensor,
    factors: tuple[Tensor, ...],
    *compile_time: Any,
) -> Tensor:
    """Run a kernel on each head of each token, and return the rotated queries."""
    news = tuple(tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in news)
    (batch, heads, length, width), key_heads = news[0].shape, news[1].shape[1]
    factors = tuple(tensor.expand(batch, 1, length, width).contiguous() for tensor in factors)
    out = news[0].new_empty(news[0].shape)
    strides = tuple(tensor.stride()[:3] for tensor in news)
    use_pdl = torch.cuda.get_device_capability(out.device)[0] >= 9
    tensors = news, strides, (out, *cache), slots.contiguous(), factors
    sizes = length, heads, key_heads, cache[0].shape[2]
    with torch.cuda.device_of(out):
        grid = batch * length, heads + 2 * key_heads
        kernel[grid](*tensors, *sizes, *compile_time, use_pdl, num_warps=1, launch_pdl=use_pdl)
    return out
