"""`rotate_and_store`: RoPE of a decoder's new queries and keys, and the write of keys and values into the cache."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.checks import broadcasts
from pt2mx.ops.operator import As, Operator, T, operator


@operator("rotate_and_store", 1, "(B, heads, S, D) bfloat16, the rotated queries")
class RotateAndStore(Operator[T]):
    """The rotated queries; the rotated keys and the values are written into the cache. A rotated row is `x * cos + y *
    sin` in float32, rounded, where y has the halves of x in the other order, and the second, now first, negated.

    Example:
        >>> new, cache = torch.tensor([1.0, 2.0]).bfloat16().reshape(1, 1, 1, 2), torch.zeros(1, 1, 3, 2).bfloat16()
        >>> keys, values, one = cache.clone(), cache.clone(), torch.ones(1, 1, 1, 2).bfloat16()
        >>> torch.ops.pt2mx.rotate_and_store(new, new, new, keys, values, torch.tensor([1]), 0 * one, one).flatten()
        tensor([-2.,  1.], dtype=torch.bfloat16)
        >>> keys[0, 0, 1], values[0, 0, 1]
        (tensor([-2.,  1.], dtype=torch.bfloat16), tensor([1., 2.], dtype=torch.bfloat16))
    """

    query: Annotated[T, "(B, heads, S, D) bfloat16"]
    key: Annotated[T, "(B, heads of the keys, S, D) bfloat16"]
    value: Annotated[T, "(B, heads of the keys, S, W) bfloat16"]
    keys: Annotated[T, As("keys", "Tensor(a!)"), "(B, heads of the keys, L, D) bfloat16, written"]
    values: Annotated[T, As("values", "Tensor(b!)"), "(B, heads of the keys, L, W) bfloat16, written"]
    slots: Annotated[T, "(S,) int64, the slots of the cache that are written"]
    cos: Annotated[T, "bfloat16 that broadcasts to (B, 1, S, D)"]
    sin: Annotated[T, "as `cos`"]

    def check(self) -> None:
        tensors = self.query, self.key, self.value, self.keys, self.values, self.cos, self.sin
        if any(tensor.dtype != torch.bfloat16 or tensor.dim() != 4 for tensor in tensors):
            given = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
            raise MXError(f"queries, keys, values, cache and factors must be bfloat16 of 4 dimensions, not {given}")
        (batch, _, length, width), (_, heads, slots, value_width) = self.query.shape, self.values.shape
        fits = self.key.shape == (batch, heads, length, width) and self.value.shape == (
            batch,
            heads,
            length,
            value_width,
        )
        if not fits or self.keys.shape != (batch, heads, slots, width) or self.values.shape[0] != batch or width % 2:
            raise MXError(
                f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}, value {tuple(self.value.shape)} and a "
                f"cache of {tuple(self.keys.shape)} and {tuple(self.values.shape)} do not fit each other"
            )
        if self.slots.shape != (length,) or self.slots.dtype != torch.int64:
            raise MXError(f"slots must be ({length},) torch.int64, not {tuple(self.slots.shape)} {self.slots.dtype}")
        for factor in (self.cos, self.sin):
            if not broadcasts(factor.shape, (batch, 1, length, width)):
                raise MXError(f"cos and sin must broadcast to {(batch, 1, length, width)}, not {tuple(factor.shape)}")

    def kernel(self) -> Tensor:
        self.check()
        result = run_kernel("rotate_and_store", *self.args)
        return self.decompose() if result is None else result

    def decompose(self) -> Tensor:
        self.keys.index_copy_(2, self.slots, self._rotated(self.key))
        self.values.index_copy_(2, self.slots, self.value)
        return self._rotated(self.query)

    def _rotated(self, x: Tensor) -> Tensor:
        wide = x.float()
        first, second = wide.chunk(2, -1)
        rotated = wide * self.cos.float() + torch.cat([-second, first], -1) * self.sin.float()
        return rotated.to(x.dtype).contiguous()


rotate_and_store = RotateAndStore.overload
