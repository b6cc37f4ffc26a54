"""TorchMX's tensor: `pt2mx.MXTensor` with TorchMX's constructor, and its parts in the bytes that TorchMX stores.

Inside, it is pt2mx's tensor, with pt2mx's codes and scales. Reading `_data` and `_scale_e8m0` converts them
(`PRESETS["torchmx"]`: the first of two FP4 codes in the high nibble, an FP6 code a byte, whole numbers as int8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pt2mx.compat import PRESETS
from pt2mx.errors import MXError, check_integer
from pt2mx.ops.checks import check_tensors
from pt2mx.spec import parse
from pt2mx.tensor import mx_tensor as core
from pt2mx.torchmx.dtypes import DType, dtype_of
from pt2mx.torchmx.operators import as_bytes, as_stored
from pt2mx.torchmx.operators import dequantize_mx as dequantize_mx  # under the names of TorchMX too
from pt2mx.torchmx.operators import quantize_mx as quantize_mx

_TORCHMX = PRESETS["torchmx"]


class MXTensor(core.MXTensor):
    """A `pt2mx.MXTensor` with TorchMX's constructor and attributes.

    `padding` is the number of values that the last block lacks. `_data` and `_scale_e8m0` are the bytes that TorchMX
    stores.
    """

    @staticmethod
    def __new__(
        cls,
        scale_e8m0_bits: Tensor,
        data_bits: Tensor,
        elem_dtype: DType,
        block_size: int,
        orig_dtype: torch.dtype,
        padding: int = 0,
        block_dim: int | None = None,
    ) -> MXTensor:
        check_tensors(scale_e8m0_bits=scale_e8m0_bits, data_bits=data_bits)
        spec = parse(elem_dtype, block_size=block_size, axis=-1 if block_dim is None else block_dim)
        if not data_bits.dim() == scale_e8m0_bits.dim() > 0 or not -data_bits.dim() <= spec.axis < data_bits.dim():
            raise MXError(
                f"scales of shape {tuple(scale_e8m0_bits.shape)} and codes of shape {tuple(data_bits.shape)} have no "
                f"dimension {spec.axis} in common"
            )
        check_integer("padding", padding, 0, block_size - 1)
        if scale_e8m0_bits.dtype != torch.uint8:
            raise MXError(f"scale_e8m0_bits are uint8, not {scale_e8m0_bits.dtype}: view them as torch.uint8")
        length = scale_e8m0_bits.shape[spec.axis] * block_size - padding
        scale, qdata = _TORCHMX.from_storage(scale_e8m0_bits, as_bytes(data_bits), spec)
        return core.MXTensor.__new__(cls, qdata, scale, spec.element, block_size, spec.axis, orig_dtype, length)

    @staticmethod
    def to_mx(
        data_hp: object,
        elem_dtype: object,
        block_size: int | None = None,
        axis: int | None = None,
        scale_mode: str | None = None,
        rounding: str | None = None,
        seed: int | None = None,
        tensor_scale: Tensor | None = None,
    ) -> MXTensor:
        """Quantize as `pt2mx.MXTensor.to_mx`; the gradient passes straight through to `data_hp`."""
        fields = {"block_size": block_size, "axis": axis, "scale_mode": scale_mode, "rounding": rounding}
        spec = parse(elem_dtype, **{name: value for name, value in fields.items() if value is not None})
        spec.check_plain_scale()
        return _quantized(data_hp, spec, seed, tensor_scale)

    @property
    def _scale_e8m0(self) -> Tensor:
        return self._stored()[0]

    @property
    def _data(self) -> Tensor:
        return self._stored()[1]

    @property
    def _elem_dtype(self) -> DType:
        return dtype_of(self.elem_dtype)

    @property
    def _block_size(self) -> int:
        return self.block_size

    @property
    def _orig_dtype(self) -> torch.dtype:
        return self.dtype

    @_orig_dtype.setter
    def _orig_dtype(self, dtype: torch.dtype) -> None:
        """Read the same codes in another dtype from now on, in matmuls and views too."""
        other = _in_dtype(self, dtype)
        with torch._C.DisableTorchFunctionSubclass():
            self.data = other

    @property
    def _padding(self) -> int:
        return -self.shape[self.axis] % self.block_size

    @property
    def _block_dim(self) -> int:
        return self.axis

    def _stored(self) -> tuple[Tensor, Tensor]:
        scale, data = _TORCHMX.to_storage(self.scale, self.qdata, self.spec, self.shape[self.axis])
        return scale, as_stored(data, self.spec)

    def with_parts(
        self, qdata: Tensor, scale: Tensor, axis: int, values: Tensor, tensor_scale: Tensor | None = None
    ) -> MXTensor:
        """Return other storage of the same format, as `pt2mx.MXTensor.with_parts` does."""
        return _from_core(super().with_parts(qdata, scale, axis, values, tensor_scale))

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *layout: Any) -> MXTensor:
        return _from_core(core.MXTensor.__tensor_unflatten__(parts, *layout))


@MXTensor.implements(torch.ops.aten.sum.dim_IntList)
def _sum(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sum the values, in high precision."""
    x, *rest = args
    return func(x.to_dtype(), *rest, **kwargs)


class ToMXConstrFunc(torch.autograd.Function):
    """Quantize with `apply(data_hp, elem_dtype, block_size)`; the gradient passes unchanged. `apply` has the arguments
    of `MXTensor.to_mx`."""

    @staticmethod
    def forward(ctx: Any, data_hp: object, *args: Any) -> MXTensor:
        ctx.arg_count = len(args)
        return _from_core(core.MXTensor.to_mx(data_hp, *args))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad,) + (None,) * ctx.arg_count


#: dequantize with `apply(tensor_lp, target_dtype)`
FromMXConstrFunc = core._FromMX


class NoopFwToMXBw(torch.autograd.Function):
    """Return x from `apply(x, elem_dtype, block_size)`, and quantize its gradient to an `MXTensor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, elem_dtype: object, block_size: int) -> Tensor:
        ctx.format = elem_dtype, block_size
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[MXTensor, None, None]:
        return MXTensor.to_mx(grad, *ctx.format), None, None


# one call for torch.compile, as in pt2mx.tensor
@torch.compiler.allow_in_graph
def _quantized(data_hp: object, *args: Any) -> MXTensor:
    return ToMXConstrFunc.apply(data_hp, *args)


def _from_core(x: core.MXTensor) -> MXTensor:
    x.spec.check_plain_scale()
    return _in_dtype(x, x.dtype)


def _in_dtype(x: core.MXTensor, dtype: torch.dtype) -> MXTensor:
    where = (x.axis, dtype, x.shape[x.axis], x.stride())
    return core.MXTensor.__new__(MXTensor, x.qdata, x.scale, x.elem_dtype, x.block_size, *where)
