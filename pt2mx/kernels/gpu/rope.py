"""RoPE of the new queries and keys of a decoder's step, and the write of keys and values into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from pt2mx.kernels.gpu.rope_kernel import rotate_and_store_kernel

__all__ = ["rotate_and_store"]


def rotate_and_store(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, cos: Tensor, sin: Tensor
) -> Tensor | None:
    """Return None for widths that are not powers of two, and for a cache that is not contiguous."""
    (batch, heads, length, width), (_, key_heads, count, value_width) = query.shape, values.shape
    whole = all(n >= 16 and n & (n - 1) == 0 for n in (width, value_width))
    if not whole or not (keys.is_contiguous() and values.is_contiguous()) or not query.numel():
        return None
    key, value = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (key, value))
    query = query if query.stride(3) == 1 else query.contiguous()
    cos, sin = (tensor.expand(batch, 1, length, width).contiguous() for tensor in (cos, sin))
    out = query.new_empty(query.shape)
    strides = tuple(tensor.stride()[:3] for tensor in (query, key, value))
    use_pdl = torch.cuda.get_device_capability(query.device)[0] >= 9
    with torch.cuda.device_of(query):
        rotate_and_store_kernel[batch * length, heads + 2 * key_heads](
            (query, key, value), strides, (out, keys, values), slots, (cos, sin), length, heads, key_heads, count,
            width, value_width, use_pdl, num_warps=1, launch_pdl=use_pdl,
        )  # fmt: skip
    return out
