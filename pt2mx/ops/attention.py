"""`attention_mx`: attention over keys and values that stay packed, as a cache of codes holds them.

It computes what `scaled_dot_product_attention` does of the dequantized keys and values, with float32 sums in another
order, and is what the lowered program calls (`pt2mx.fx.lower`). `pt2mx.kernels.dequantize_then_matmul` defines it on
every device; `pt2mx.kernels.select` lists the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.arguments import BlockSize, Element
from pt2mx.ops.checks import check_packed
from pt2mx.ops.operator import Operator, T, operator
from pt2mx.ops.quantization import dequantize_mx
from pt2mx.spec import MXSpec


@operator("attention_mx", 1, "(B, heads, S, `value_width`) in the query's dtype")
@dataclass(frozen=True, slots=True)
class AttentionMX(Operator[T]):
    """`scaled_dot_product_attention` over a cache of codes: keys and values are `dequantize_mx` of theirs along the
    last dimension, in the query's dtype. Each key has the queries of as many heads as there are more of them. Sums are
    in float32, in any order; a query that sees no key gives zeros.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4).reshape(1, 1, 4, 4), "mxfp4")
        >>> query = torch.tensor([8.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
        >>> torch.ops.pt2mx.attention_mx(query, data, scale, data, scale, "fp4_e2m1", 32, 4).flatten()
        tensor([0.9479, 0.0174, 0.0174, 0.0174])
    """

    query: Annotated[T, "(B, heads, S, D) float32, float16 or bfloat16"]
    key_data: Annotated[T, "(B, heads of the keys, L, bytes of D) uint8, packed along D, which is the axis"]
    key_scale: Annotated[T, "(B, heads of the keys, L, ceil(D / block_size)) uint8, E8M0"]
    value_data: Annotated[T, "(B, heads of the keys, L, bytes of `value_width`) uint8"]
    value_scale: Annotated[T, "(B, heads of the keys, L, ceil(`value_width` / block_size)) uint8, E8M0"]
    element: Element
    block_size: BlockSize
    value_width: Annotated[int, "values of a head"]
    mask: Annotated[
        T | None, "(B or 1, heads or 1, S, L) booleans, false where a key is hidden from a query; or None"
    ] = None
    scale: Annotated[float | None, "of the scores; None: D ** -0.5"] = None

    def check(self) -> MXSpec:
        """Return the spec of keys and values; MXError for what does not fit."""
        query, keys, values, mask = self.query, self.key_data, self.value_data, self.mask
        if not query.dim() == keys.dim() == values.dim() == 4 or keys.shape[:3] != values.shape[:3]:
            raise MXError(
                f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} must be "
                "(B, heads, S, D), (B, heads, L, bytes) and (B, heads, L, bytes)"
            )
        heads, key_heads = query.shape[1], keys.shape[1]
        if query.shape[0] != keys.shape[0] or (heads if key_heads == 0 else heads % key_heads):
            raise MXError(
                f"a query of {query.shape[0]} sequences and {query.shape[1]} heads does not fit keys of "
                f"{keys.shape[0]} sequences and {keys.shape[1]} heads: a multiple of these is allowed"
            )
        if any(tensor.device != query.device for tensor in (keys, self.key_scale, values, self.value_scale)):
            raise MXError(f"the query is on {query.device} and keys or values on another device: move them to one")
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
            raise MXError(f"the mask is {mask.dtype} of {mask.dim()} dimensions: it must be (B, heads, S, L) booleans")
        scores = *query.shape[:3], keys.shape[2]
        if mask is not None and (mask.device != query.device or not broadcasts(mask.shape, scores)):
            raise MXError(
                f"a mask of {tuple(mask.shape)} on {mask.device} does not fit: it must be on {query.device} and "
                f"broadcast to {tuple(scores)}"
            )
        modes = self.element, self.block_size, query.dtype, -1
        check_packed(values, self.value_scale, *modes, self.value_width)
        return check_packed(keys, self.key_scale, *modes, query.shape[-1])[0]

    def kernel(self) -> Tensor:
        packed = (self.key_data, self.key_scale), (self.value_data, self.value_scale)
        return run_kernel(
            "attention_mx", self.query, *packed, self.check(), self.value_width, self.mask, self.scale
        ).contiguous()

    def fake(self) -> Tensor:
        self.check()
        return self.query.new_empty((*self.query.shape[:3], self.value_width))

    def decompose(self) -> Tensor:
        query, modes = self.query, (self.element, self.block_size, self.query.dtype, -1)
        keys = dequantize_mx(self.key_data, self.key_scale, *modes, query.shape[-1])
        values = dequantize_mx(self.value_data, self.value_scale, *modes, self.value_width)
        return functional.scaled_dot_product_attention(
            query, keys, values, self.mask, scale=self.scale, enable_gqa=query.shape[1] != keys.shape[1]
        ).contiguous()


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return False where a shape is known not to broadcast to one of as many dimensions. Symbolic sizes are checked
    when they run."""
    pairs = [(n, m) for n, m in zip(shape, to, strict=True) if isinstance(n, int) and isinstance(m, int)]
    return all(n in (1, m) for n, m in pairs)


attention_mx = AttentionMX.overload
