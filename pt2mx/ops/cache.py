"""`store_mx`: the write of new keys and values into a cache of codes."""

from __future__ import annotations

from typing import Annotated

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pt2mx.errors import MXError
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.arguments import ROWS
from pt2mx.ops.checks import check_input, check_one_device, check_packed
from pt2mx.ops.operator import COMPLIANT, As, Format, Operator, T, operator
from pt2mx.ops.quantization import Quantize
from pt2mx.spec import MXSpec


@operator("store_mx", 1, {}, COMPLIANT, key="CompositeImplicitAutograd")
class StoreMX(Operator[T]):
    """Quantize new keys and values along their last dimension, as `quantize_mx` does, and write their codes and scales
    into slots of a cache, as `index_copy_` does. `torch.compile` sees these operators.

    Example:
        >>> new, slots = torch.tensor([1.0, 2.0, 3.0, 6.0]).reshape(1, 1, 1, 4), torch.tensor([1])
        >>> keys, values = torch.zeros(2, 1, 1, 2, 2, dtype=torch.uint8)
        >>> key_scale, value_scale = torch.zeros(2, 1, 1, 2, 1, dtype=torch.uint8)
        >>> cache = keys, key_scale, values, value_scale
        >>> torch.ops.pt2mx.store_mx(new, -new, *cache, slots, "fp4_e2m1", 32, "floor", "even")
        >>> keys.flatten(), value_scale.flatten()
        (tensor([  0,   0,  66, 117], dtype=torch.uint8), tensor([  0, 127], dtype=torch.uint8))
    """

    key: Annotated[T, "(B, heads of the keys, S, D) float32, float16 or bfloat16"]
    value: Annotated[T, "(B, heads of the keys, S, W) in the key's dtype"]
    key_data: Annotated[T, As(type="Tensor(a!)"), "(B, heads of the keys, L, bytes of D) uint8, written"]
    key_scale: Annotated[T, As(type="Tensor(b!)"), "(B, heads of the keys, L, ceil(D / block_size)) uint8, written"]
    value_data: Annotated[T, As(type="Tensor(c!)"), "(B, heads of the keys, L, bytes of W) uint8, written"]
    value_scale: Annotated[T, As(type="Tensor(d!)"), "(B, heads of the keys, L, ceil(W / block_size)) uint8, written"]
    slots: Annotated[T, "(S,) int64, the slots that are written, without repetitions"]
    spec: Annotated[MXSpec, Format(ROWS)]

    def check(self) -> MXSpec:
        """Return the spec of keys and values."""
        check_one_device(self.args)
        spec = check_input(self.key, self.spec)
        pairs = ((self.key, self.key_data, self.key_scale), (self.value, self.value_data, self.value_scale))
        for x, data, scale in pairs:
            if x.dim() != 4 or data.dim() != 4 or x.shape[:2] != data.shape[:2] or x.dtype != self.key.dtype:
                raise MXError(
                    f"{tuple(x.shape)} {x.dtype} cannot be stored in a cache of {tuple(data.shape)}: keys and values "
                    "must be (B, heads, S, D) of one dtype, and codes (B, heads, L, bytes)"
                )
            check_packed(data, scale, self.spec, x.dtype, x.shape[3])
        length = self.key.shape[2]
        if self.value.shape[2] != length or self.slots.shape != (length,) or self.slots.dtype != torch.int64:
            raise MXError(
                f"slots of {tuple(self.slots.shape)} {self.slots.dtype} do not fit {length} keys and "
                f"{self.value.shape[2]} values: pass ({length},) torch.int64, a slot for each"
            )
        return spec

    def kernel(self) -> None:
        try:
            if is_in_torch_dispatch_mode():  # which sees the operators of the definition, but no kernel
                self.check()
                self.decompose()
            else:
                run_kernel(self, self.check())
        except IndexError as error:
            length = min(self.key_data.shape[2], self.value_data.shape[2])
            raise MXError(f"a slot does not exist, {error}: pass slots of at least 0 and below {length}") from None

    def decompose(self) -> None:
        for x, data, scale in (
            (self.key, self.key_data, self.key_scale),
            (self.value, self.value_data, self.value_scale),
        ):
            new_scale, codes = Quantize(x, self.spec).call()
            data.index_copy_(2, self.slots, codes)
            scale.index_copy_(2, self.slots, new_scale)


store_mx = StoreMX.overload
