"""RoPE of a decoder's new queries and keys, and the write of its cache, in bfloat16 or as codes, on an NVIDIA GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.kernels.gpu.device import uses_pdl
from pt2mx.kernels.gpu.quantize import Tile, as_integers, constants_of, packs
from pt2mx.kernels.gpu.rope_kernel import rotate_and_store_kernel
from pt2mx.kernels.gpu.tiles import Constants
from pt2mx.kernels.packing import group_of
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.rope import RotateAndStore, RotateQuantizeAndStore

    _Call = RotateAndStore[Tensor] | RotateQuantizeAndStore[Tensor]


def rotate_and_store(call: RotateAndStore[Tensor]) -> Tensor | None:
    """Return None for widths that are not powers of two, and for a cache that is not contiguous."""
    cache = call.keys, call.values
    return _run(call, cache, None, None) if _fits(call, cache) else None


def rotate_quantize_and_store(call: RotateQuantizeAndStore[Tensor], spec: MXSpec) -> Tensor | None:
    """Return None for widths and blocks that are not powers of two, for codes of other sizes than 4, 6 and 8 bits, and
    for a cache that is not contiguous."""
    cache = call.key_data, call.key_scale, call.value_data, call.value_scale
    constants = [_constants(spec, tensor.shape[3]) for tensor in (call.key, call.value)]
    if not _fits(call, cache) or None in constants:
        return None
    stored = call.key_data, as_integers(call.key_scale), call.value_data, as_integers(call.value_scale)
    return _run(call, stored, *constants)


def _fits(call: _Call, cache: tuple[Tensor, ...]) -> bool:
    whole = all(n >= 16 and n & (n - 1) == 0 for n in (call.key.shape[3], call.value.shape[3]))
    return whole and all(tensor.is_contiguous() for tensor in cache) and call.query.numel() > 0


def _constants(spec: MXSpec, width: int) -> Constants | None:
    """Return the compile-time values of a row of `width` values; None for a row that is no tile of whole blocks."""
    block = min(spec.block_size, width)
    if block & (block - 1) or not packs(spec, width):
        return None
    return constants_of(spec, group_of(spec.element.bits), width, 1, False, Tile(width, 1))


def _run(call: _Call, cache: tuple[Tensor, ...], *constants: Constants | None) -> Tensor:
    """Run the kernel on each head of each token, and return the rotated queries."""
    tensors = call.query, call.key, call.value
    news = tuple(tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in tensors)
    (batch, heads, length, width), key_heads = news[0].shape, news[1].shape[1]
    factors = tuple(tensor.expand(batch, 1, length, width).contiguous() for tensor in (call.cos, call.sin))
    out = news[0].new_empty(news[0].shape)
    strides = tuple(tensor.stride()[:3] for tensor in news)
    use_pdl = uses_pdl(out.device)
    arguments = news, strides, (out, *cache), call.slots.contiguous(), factors
    sizes = length, heads, key_heads, cache[0].shape[2]
    with torch.cuda.device_of(out):
        grid = batch * length, heads + 2 * key_heads
        widths = width, call.value.shape[3]
        rotate_and_store_kernel[grid](*arguments, *sizes, *widths, *constants, use_pdl, num_warps=1, launch_pdl=use_pdl)
    return out
