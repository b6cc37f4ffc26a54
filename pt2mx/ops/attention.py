"""`torch.ops.pt2mx.attention_mx`: attention over keys and values that stay packed, as a cache of codes holds them.

It computes what `scaled_dot_product_attention` does of the dequantized keys and values, with fp32 sums in another
order, and is what the lowered program calls (`pt2mx.fx.lower`). `pt2mx.kernels.dequantize_then_attend` defines it on
every device; `pt2mx.kernels.select` lists the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.checks import check_packed
from pt2mx.spec import MXSpec


def _attention(
    query: Tensor,
    key_data: Tensor,
    key_scale: Tensor,
    value_data: Tensor,
    value_scale: Tensor,
    elem: str,
    block_size: int,
    value_width: int,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    spec = _check(query, key_data, key_scale, value_data, value_scale, elem, block_size, value_width, mask)
    packed = (key_data, key_scale), (value_data, value_scale)
    return run_kernel("attention_mx", query, *packed, spec, value_width, mask, scale).contiguous()


def _attention_fake(
    query: Tensor,
    key_data: Tensor,
    key_scale: Tensor,
    value_data: Tensor,
    value_scale: Tensor,
    elem: str,
    block_size: int,
    value_width: int,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    _check(query, key_data, key_scale, value_data, value_scale, elem, block_size, value_width, mask)
    return query.new_empty((*query.shape[:3], value_width))


def _check(
    query: Tensor,
    key_data: Tensor,
    key_scale: Tensor,
    value_data: Tensor,
    value_scale: Tensor,
    elem: str,
    block_size: int,
    value_width: int,
    mask: Tensor | None,
) -> MXSpec:
    if not query.dim() == key_data.dim() == value_data.dim() == 4 or key_data.shape[:3] != value_data.shape[:3]:
        raise MXError(
            f"query {tuple(query.shape)}, keys {tuple(key_data.shape)} and values {tuple(value_data.shape)} must be "
            "(B, heads, S, D), (B, heads, L, bytes) and (B, heads, L, bytes)"
        )
    heads, key_heads = query.shape[1], key_data.shape[1]
    if query.shape[0] != key_data.shape[0] or (heads if key_heads == 0 else heads % key_heads):
        raise MXError(
            f"a query of {query.shape[0]} sequences and {query.shape[1]} heads does not fit keys of "
            f"{key_data.shape[0]} sequences and {key_data.shape[1]} heads: a multiple of these is allowed"
        )
    if any(tensor.device != query.device for tensor in (key_data, key_scale, value_data, value_scale)):
        raise MXError(f"the query is on {query.device} and keys or values on another device: move them to one")
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
        raise MXError(f"the mask is {mask.dtype} of {mask.dim()} dimensions: it must be (B, heads, S, L) booleans")
    wanted = *query.shape[:3], key_data.shape[2]
    if mask is not None and (mask.device != query.device or not broadcasts(mask.shape, wanted)):
        raise MXError(
            f"a mask of {tuple(mask.shape)} on {mask.device} does not fit: it must be on {query.device} and broadcast "
            f"to {tuple(wanted)}"
        )
    check_packed(value_data, value_scale, elem, block_size, query.dtype, -1, value_width)
    return check_packed(key_data, key_scale, elem, block_size, query.dtype, -1, query.shape[-1])[0]


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return False where a shape is known not to broadcast to one of as many dimensions. Symbolic sizes are checked
    when they run."""
    pairs = [(n, m) for n, m in zip(shape, to, strict=True) if isinstance(n, int) and isinstance(m, int)]
    return all(n in (1, m) for n, m in pairs)


torch.library.define(
    "pt2mx::attention_mx",
    "(Tensor query, Tensor key_data, Tensor key_scale, Tensor value_data, Tensor value_scale, str elem_dtype_name, "
    "int block_size, int value_width, Tensor? mask=None, float? scale=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
torch.library.impl("pt2mx::attention_mx", "CompositeExplicitAutograd", _attention)
torch.library.register_fake("pt2mx::attention_mx", _attention_fake)

attention_mx = torch.ops.pt2mx.attention_mx.default
