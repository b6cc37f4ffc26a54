"""Attention over packed keys and values: dequantize them, then torch's own attention.

It defines `attention_mx`, and serves where no faster twin does: prompts, whose time is that of the products, and
devices without one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.kernels.select import run_kernel
from pt2mx.spec import MXSpec

__all__ = ["attend"]

#: (codes, scales) of keys or values: (B, heads, L, bytes) and (B, heads, L, blocks) uint8
Packed = tuple[Tensor, Tensor]


def attend(
    query: Tensor, key: Packed, value: Packed, spec: MXSpec, value_width: int, mask: Tensor | None, scale: float | None
) -> Tensor:
    """query: (B, heads, S, D), its heads a multiple of those of the keys, mask: (B or 1, heads or 1, S, L) booleans,
    false where a key is hidden, or None -> (B, heads, S, value_width)."""
    keys, values = _values(key, spec, query.dtype, query.shape[-1]), _values(value, spec, query.dtype, value_width)
    grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)


def _values(packed: Packed, spec: MXSpec, dtype: torch.dtype, width: int) -> Tensor:
    data, scale = packed
    spec = spec.replace(axis=data.dim() - 1)
    return run_kernel("dequantize_mx", data, scale, spec, dtype, width)
