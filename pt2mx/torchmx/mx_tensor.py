"""TorchMX's tensor: `pt2mx.MXTensor` with TorchMX's constructor, and its parts in the bytes that TorchMX stores.

Inside it is the same tensor, codes and scales as pt2mx has them; `_data` and `_scale_e8m0` are translated when they are
read (`PRESETS["torchmx"]`: the first of two FP4 codes in the high nibble, an FP6 code a byte, whole numbers as int8).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.compat import PRESETS
from pt2mx.errors import MXError
from pt2mx.ops.checks import check_tensors
from pt2mx.spec import MXSpec, parse
from pt2mx.tensor import mx_tensor as core
from pt2mx.torchmx.dtypes import DType, dtype_of

_TORCHMX = PRESETS["torchmx"]


def quantize_mx(data_hp: Tensor, elem_dtype_name: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize along the last dimension, as `torchmx.mx_tensor.quantize_mx` of TorchMX does.

    Args:
        data_hp: (..., n) float32, float16 or bfloat16.
        elem_dtype_name: the element format, as `pt2mx.parse` takes it.
        block_size: values that share a scale.

    Returns:
        scale: (..., ceil(n / block_size)) uint8.
        data: (..., n) uint8, int8 for integers; (..., ceil(n / 2)) for FP4.

    Raises:
        MXError: as `pt2mx.quantize_mx`; for int8 blocks below 2**-121, which TorchMX's scale cannot say.

    Example:
        >>> import torch
        >>> from pt2mx.torchmx import mx_tensor
        >>> mx_tensor.quantize_mx(torch.tensor([1.0, 2.0, 3.0, 6.0]), "float4_e2m1", 4)
        (tensor([127], dtype=torch.uint8), tensor([36, 87], dtype=torch.uint8))
    """
    scale, data = _TORCHMX.quantize(data_hp, elem_dtype_name, block_size=block_size)
    return scale, _as_stored(data, parse(elem_dtype_name))


def dequantize_mx(
    data_lp: Tensor,
    shared_exp_e8m0: Tensor,
    elem_dtype_name: str,
    block_size: int,
    target_dtype: torch.dtype,
    block_dim: int,
) -> Tensor:
    """Dequantize, as `torchmx.mx_tensor.dequantize_mx` of TorchMX does.

    Args:
        data_lp, shared_exp_e8m0: data and scale as `quantize_mx` returns them.
        elem_dtype_name: the element format, as `pt2mx.parse` takes it.
        block_size: values that share a scale.
        target_dtype: float32, float16 or bfloat16.
        block_dim: the dimension along which blocks run.

    Returns:
        (..., n, ...) in `target_dtype`; an odd number of FP4 codes comes with the one that fills their last byte.

    Raises:
        MXError: for shapes that do not fit each other, or other dtypes.

    Example:
        >>> import torch
        >>> from pt2mx.torchmx import mx_tensor
        >>> scale, data = mx_tensor.quantize_mx(torch.tensor([1.0, 2.0, 3.0, 6.0]), "float4_e2m1", 4)
        >>> mx_tensor.dequantize_mx(data, scale, "float4_e2m1", 4, torch.float32, -1)
        tensor([1., 2., 3., 6.])
    """
    check_tensors(data_lp=data_lp, shared_exp_e8m0=shared_exp_e8m0)
    blocks = {"block_size": block_size, "axis": block_dim}
    return _TORCHMX.dequantize(_as_bytes(data_lp), shared_exp_e8m0, elem_dtype_name, target_dtype, **blocks)


class MXTensor(core.MXTensor):
    """A `pt2mx.MXTensor` made and read as TorchMX's.

    Args:
        scale_e8m0_bits: (..., blocks, ...) uint8.
        data_bits: as `quantize_mx` gives them.
        elem_dtype: a `DType`, or the element format as `pt2mx.parse_element` takes it.
        block_size: values that share a scale.
        orig_dtype: of the values: float32, float16 or bfloat16.
        padding: values by which the last block is shorter.
        block_dim: the dimension along which blocks run, by default the last.

    Raises:
        MXError: where these do not fit each other.

    Example:
        >>> import torch
        >>> from pt2mx import torchmx
        >>> x = torchmx.MXTensor.to_mx(torch.tensor([1.0, 2.0, 3.0, 6.0]), torchmx.dtypes.float4_e2m1, 4)
        >>> x
        MXTensor(shape=(4,), elem_dtype=fp4_e2m1, block_size=4, axis=0, dtype=torch.float32, device='cpu')
        >>> x._data, x._scale_e8m0  # the bytes that TorchMX stores
        (tensor([36, 87], dtype=torch.uint8), tensor([127], dtype=torch.uint8))
        >>> x.to_dtype(torch.float32)
        tensor([1., 2., 3., 6.])
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
        if type(padding) is not int or not 0 <= padding < block_size:
            raise MXError(f"padding={padding!r} must be an integer from 0 to {block_size - 1}")
        if scale_e8m0_bits.dtype != torch.uint8:
            raise MXError(f"scale_e8m0_bits are uint8, not {scale_e8m0_bits.dtype}: view them as torch.uint8")
        length = scale_e8m0_bits.shape[spec.axis] * block_size - padding
        scale, qdata = _TORCHMX.from_storage(scale_e8m0_bits, _as_bytes(data_bits), spec)
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
    ) -> MXTensor:
        """Quantize; the gradient passes straight through to `data_hp`.

        Args:
            data_hp, elem_dtype, block_size, axis, scale_mode, rounding, seed: as in `pt2mx.MXTensor.to_mx`.

        Returns:
            The quantized tensor, in the shape and dtype of `data_hp`.

        Raises:
            MXError: as `pt2mx.MXTensor.to_mx`.
        """
        fields = {"block_size": block_size, "axis": axis, "scale_mode": scale_mode, "rounding": rounding}
        spec = parse(elem_dtype, **{name: value for name, value in fields.items() if value is not None})
        return _quantized(data_hp, *spec.op_args(), seed)

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

    @property
    def _padding(self) -> int:
        return -self.shape[self.axis] % self.block_size

    @property
    def _block_dim(self) -> int:
        return self.axis

    def _stored(self) -> tuple[Tensor, Tensor]:
        scale, data = _TORCHMX.to_storage(self.scale, self.qdata, self.spec, self.shape[self.axis])
        return scale, _as_stored(data, self.spec)

    def with_parts(self, qdata: Tensor, scale: Tensor, axis: int, values: Tensor) -> MXTensor:
        """Return other storage of the same format, as `pt2mx.MXTensor.with_parts` does.

        Args:
            qdata, scale, axis, values: as there.

        Returns:
            The tensor.
        """
        return _from_core(super().with_parts(qdata, scale, axis, values))

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *layout: Any) -> MXTensor:
        return _from_core(core.MXTensor.__tensor_unflatten__(parts, *layout))


class ToMXConstrFunc(torch.autograd.Function):
    """`apply(data_hp, elem_dtype, block_size)`: quantize; the gradient passes unchanged. Further arguments are those of
    `MXTensor.to_mx`."""

    @staticmethod
    def forward(ctx: Any, data_hp: object, *modes: Any) -> MXTensor:
        ctx.modes = len(modes)
        return _from_core(core.MXTensor.to_mx(data_hp, *modes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad,) + (None,) * ctx.modes


class FromMXConstrFunc(torch.autograd.Function):
    """`apply(tensor_lp, target_dtype)`: dequantize; the gradient passes in the dtype of `tensor_lp`."""

    @staticmethod
    def forward(ctx: Any, tensor_lp: core.MXTensor, target_dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor_lp.dtype
        return tensor_lp.to_dtype(target_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class NoopFwToMXBw(torch.autograd.Function):
    """`apply(x, elem_dtype, block_size)`: x itself; its gradient becomes an `MXTensor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, elem_dtype: object, block_size: int) -> Tensor:
        ctx.format = elem_dtype, block_size
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[MXTensor, None, None]:
        return MXTensor.to_mx(grad, *ctx.format), None, None


# one call for torch.compile, as in pt2mx.tensor
@torch.compiler.allow_in_graph
def _quantized(data_hp: object, *modes: Any) -> MXTensor:
    return ToMXConstrFunc.apply(data_hp, *modes)


def _from_core(x: core.MXTensor) -> MXTensor:
    where = (x.axis, x.dtype, x.shape[x.axis], x.stride())
    return core.MXTensor.__new__(MXTensor, x.qdata, x.scale, x.elem_dtype, x.block_size, *where)


def _as_stored(data: Tensor, spec: MXSpec) -> Tensor:
    """8-bit integers are int8."""
    return data.view(torch.int8) if spec.element.is_int and spec.element.bits == 8 else data


def _as_bytes(data: Tensor) -> Tensor:
    if data.dtype not in (torch.uint8, torch.int8):
        raise MXError(f"codes are uint8 or int8, not {data.dtype}: view them as torch.uint8")
    return data.view(torch.uint8)
