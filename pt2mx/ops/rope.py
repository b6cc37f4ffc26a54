"""`rotate_and_store`, `rotate_quantize_and_store`: RoPE of a decoder's new queries and keys, and the write of keys and
values into the cache, in bfloat16 or as codes."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.arguments import ROW_SCALES, ROWS, AnyScaleMode
from pt2mx.ops.checks import broadcasts, check_input, check_one_device, check_packed
from pt2mx.ops.operator import As, Format, Operator, T, operator
from pt2mx.ops.quantization import Quantize
from pt2mx.spec import MXSpec

_QUERY = "(B, heads, S, D) bfloat16"
_KEY = "(B, heads of the keys, S, D) bfloat16"
_VALUE = "(B, heads of the keys, S, W) bfloat16"
_SLOTS = (
    "(S,) int64, the slots of the cache that are written, without repetitions; a slot outside of the cache is an error "
    "on the CPU, and a GPU skips it"
)
_FACTOR = "bfloat16 that broadcasts to (B, 1, S, D)"
_SCALE = "in the dtype of the scale format, written"


class _Rotation(Operator[T]):
    """The rows of new tokens, the slots of the cache, and the factors of RoPE, of both operators."""

    __slots__ = ()
    query: T
    key: T
    value: T
    slots: T
    cos: T
    sin: T

    def check_rotation(self, *others: Tensor) -> None:
        """Raise MXError for tensors of several devices, for new rows, slots and factors that do not fit each other, and
        for `others` that are not bfloat16 of 4 dimensions."""
        check_one_device(self.args)
        tensors = self.query, self.key, self.value, *others, self.cos, self.sin
        if any(tensor.dtype != torch.bfloat16 or tensor.dim() != 4 for tensor in tensors):
            given = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
            raise MXError(f"queries, keys, values, cache and factors must be bfloat16 of 4 dimensions, not {given}")
        (batch, _, length, width), of_key = self.query.shape, self.key.shape
        fits = of_key == (batch, of_key[1], length, width) and self.value.shape[:3] == of_key[:3]
        if not fits or width % 2:
            raise MXError(
                f"query {tuple(self.query.shape)}, key {tuple(of_key)}, value {tuple(self.value.shape)} do not fit "
                "each other: they must be (B, heads, S, D) and twice (B, heads of the keys, S, width), D even"
            )
        if self.slots.shape != (length,) or self.slots.dtype != torch.int64:
            raise MXError(f"slots must be ({length},) torch.int64, not {tuple(self.slots.shape)} {self.slots.dtype}")
        for factor in (self.cos, self.sin):
            if not broadcasts(factor.shape, (batch, 1, length, width)):
                raise MXError(f"cos and sin must broadcast to {(batch, 1, length, width)}, not {tuple(factor.shape)}")

    def rotated(self, x: Tensor) -> Tensor:
        """x: (..., S, D) bfloat16 -> the same rotated, in float32, rounded once."""
        wide = x.float()
        first, second = wide.chunk(2, -1)
        turned = wide * self.cos.float() + torch.cat([-second, first], -1) * self.sin.float()
        return turned.to(x.dtype).contiguous()


@operator("rotate_and_store", 1, "(B, heads, S, D) bfloat16, the rotated queries")
class RotateAndStore(_Rotation[T]):
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

    query: Annotated[T, _QUERY]
    key: Annotated[T, _KEY]
    value: Annotated[T, _VALUE]
    keys: Annotated[T, As("keys", "Tensor(a!)"), "(B, heads of the keys, L, D) bfloat16, written"]
    values: Annotated[T, As("values", "Tensor(b!)"), "(B, heads of the keys, L, W) bfloat16, written"]
    slots: Annotated[T, _SLOTS]
    cos: Annotated[T, _FACTOR]
    sin: Annotated[T, "as `cos`"]

    def check(self) -> None:
        self.check_rotation(self.keys, self.values)
        (batch, heads, _, width), value_width, slots = self.key.shape, self.value.shape[3], self.keys.shape[2]
        expected = (batch, heads, slots, width), (batch, heads, slots, value_width)
        if (self.keys.shape, self.values.shape) != expected:
            raise MXError(
                f"keys of {tuple(self.keys.shape)} and values of {tuple(self.values.shape)} do not fit new ones of "
                f"{tuple(self.key.shape)} and {tuple(self.value.shape)}: only dimension 2, the slots, may differ"
            )

    def decompose(self) -> Tensor:
        self.keys.index_copy_(2, self.slots, self.rotated(self.key))
        self.values.index_copy_(2, self.slots, self.value)
        return self.rotated(self.query)


@operator("rotate_quantize_and_store", 1, "(B, heads, S, D) bfloat16, the rotated queries")
class RotateQuantizeAndStore(_Rotation[T]):
    """`rotate_and_store` into a cache of codes: the rotated keys, rounded to bfloat16, and the values are quantized by
    `quantize_mx` along the last dimension, and their codes and scales are written.

    Example:
        >>> new, one = torch.tensor([1.0, 2.0]).bfloat16().reshape(1, 1, 1, 2), torch.ones(1, 1, 1, 2).bfloat16()
        >>> cache = [torch.zeros(1, 1, 3, 1, dtype=torch.uint8) for _ in range(4)]
        >>> spec = "fp4_e2m1", 32, "floor", "even"
        >>> operands = new, new, new, *cache, torch.tensor([1]), 0 * one, one, *spec
        >>> torch.ops.pt2mx.rotate_quantize_and_store(*operands).flatten()
        tensor([-2.,  1.], dtype=torch.bfloat16)
        >>> [tensor[0, 0, 1].item() for tensor in cache]  # -2, 1 and 1, 2, and the exponents of their scales
        [78, 126, 100, 126]
    """

    query: Annotated[T, _QUERY]
    key: Annotated[T, _KEY]
    value: Annotated[T, _VALUE]
    key_data: Annotated[T, As("", "Tensor(a!)"), "(B, heads of the keys, L, bytes of D) uint8, packed along D, written"]
    key_scale: Annotated[T, As("", "Tensor(b!)"), f"(B, heads of the keys, L, ceil(D / block_size)) {_SCALE}"]
    value_data: Annotated[T, As("", "Tensor(c!)"), "(B, heads of the keys, L, bytes of W) uint8, written"]
    value_scale: Annotated[T, As("", "Tensor(d!)"), f"(B, heads of the keys, L, ceil(W / block_size)) {_SCALE}"]
    slots: Annotated[T, _SLOTS]
    cos: Annotated[T, _FACTOR]
    sin: Annotated[T, "as `cos`"]
    spec: Annotated[MXSpec, Format({**ROWS, "scale_mode": AnyScaleMode}, {"spec": ROW_SCALES})]

    def check(self) -> MXSpec:
        """Return the spec of keys and values."""
        self.check_rotation()
        spec = check_input(self.key, self.spec)
        if ROUNDINGS[spec.rounding].random:
            raise MXError(f"values are not rounded {spec.rounding!r} where they are stored: use quantize_mx of them")
        if spec.has_tensor_scale:
            raise MXError(f"{spec} has a tensor scale, which new tokens would change: use a scale format without one")
        for new, data, scale in (
            (self.key, self.key_data, self.key_scale),
            (self.value, self.value_data, self.value_scale),
        ):
            if data.dim() != 4 or data.shape[:2] != new.shape[:2] or data.shape[2] != self.key_data.shape[2]:
                raise MXError(
                    f"codes of {tuple(data.shape)} do not fit new rows of {tuple(new.shape)}: they must be (B, heads "
                    "of the keys, L, bytes), and L the same for keys and values"
                )
            check_packed(data, scale, spec, torch.bfloat16, new.shape[3])
        return spec

    def decompose(self) -> Tensor:
        for new, data, scale in (
            (self.rotated(self.key), self.key_data, self.key_scale),
            (self.value.contiguous(), self.value_data, self.value_scale),
        ):
            new_scale, new_data = Quantize(new, self.spec).call()
            data.index_copy_(2, self.slots, new_data)
            scale.index_copy_(2, self.slots, new_scale)
        return self.rotated(self.query)


rotate_and_store = RotateAndStore.overload
rotate_quantize_and_store = RotateQuantizeAndStore.overload
