"""Quantize and dequantize in TorchMX's storage format, as functions and as the operators `torch.ops.torchmx.*`.
Importing this module registers the operators. It replaces TorchMX's own operators if TorchMX was imported before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pt2mx.compat import PRESETS
from pt2mx.errors import MXError
from pt2mx.kernels.packing import packed_length
from pt2mx.ops.checks import check_input, check_tensors
from pt2mx.spec import MXSpec, parse

_TORCHMX = PRESETS["torchmx"]


def quantize_mx(data_hp: Tensor, elem_dtype_name: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize (..., n) along the last dimension, as `torchmx.mx_tensor.quantize_mx` of TorchMX does.

    Returns:
        scale: (..., ceil(n / block_size)) uint8.
        data: (..., n) uint8, int8 for integers; (..., ceil(n / 2)) for FP4.

    Raises:
        MXError: as `pt2mx.quantize_mx`; for int8 blocks below 2**-121, which TorchMX's scale cannot represent.
    """
    scale, data = _TORCHMX.quantize(data_hp, elem_dtype_name, block_size=block_size)
    return scale, as_stored(data, parse(elem_dtype_name))


def dequantize_mx(
    data_lp: Tensor,
    shared_exp_e8m0: Tensor,
    elem_dtype_name: str,
    block_size: int,
    target_dtype: torch.dtype,
    block_dim: int,
) -> Tensor:
    """Dequantize along `block_dim`, as `torchmx.mx_tensor.dequantize_mx` of TorchMX does.

    An odd number of FP4 codes includes the code that fills the last byte.

    Raises:
        MXError: for shapes that do not match each other, or other dtypes.
    """
    check_tensors(data_lp=data_lp, shared_exp_e8m0=shared_exp_e8m0)
    codes = as_bytes(data_lp)
    return _TORCHMX.dequantize(
        codes, shared_exp_e8m0, elem_dtype_name, target_dtype, block_size=block_size, axis=block_dim
    )


def as_stored(data: Tensor, spec: MXSpec) -> Tensor:
    """Return codes in the dtype that TorchMX stores: int8 for 8-bit integers."""
    return data.view(torch.int8) if spec.element.is_int and spec.element.bits == 8 else data


def as_bytes(data: Tensor) -> Tensor:
    """Return TorchMX's stored codes as uint8.

    Raises:
        MXError: for another dtype.
    """
    if data.dtype not in (torch.uint8, torch.int8):
        raise MXError(f"codes are uint8 or int8, not {data.dtype}: view them as torch.uint8")
    return data.view(torch.uint8)


@torch.library.custom_op(
    "torchmx::quantize_mx",
    mutates_args=(),
    schema="(Tensor data_hp, str elem_dtype_name, SymInt block_size) -> (Tensor, Tensor)",
)
def _quantize(data_hp: Tensor, elem_dtype_name: str, block_size: int) -> tuple[Tensor, Tensor]:
    scale, data = quantize_mx(data_hp, elem_dtype_name, block_size)
    return scale.contiguous(), data.contiguous()


@_quantize.register_fake
def _quantize_fake(data_hp: Tensor, elem_dtype_name: str, block_size: int) -> tuple[Tensor, Tensor]:
    spec = check_input(data_hp, MXSpec(parse(elem_dtype_name).element, block_size))
    *rest, length = torch.atleast_1d(data_hp).shape
    scale = data_hp.new_empty((*rest, -(-length // block_size)), dtype=torch.uint8)
    bits = spec.element.bits  # 4-bit codes share bytes, narrower and 6-bit ones do not, wider ones take two
    size = packed_length(length, 4) if bits == 4 else -(-bits // 8) * length
    return scale, as_stored(data_hp.new_empty((*rest, size), dtype=torch.uint8), spec)


def _dequantize(data_lp: Tensor, shared_exp_e8m0: Tensor, elem_dtype_name: str, *where: Any) -> Tensor:
    return dequantize_mx(data_lp, shared_exp_e8m0, elem_dtype_name, *where).contiguous()


torch.library.custom_op(
    "torchmx::dequantize_mx",
    _dequantize,
    mutates_args=(),
    schema="(Tensor data_lp, Tensor shared_exp_e8m0, str elem_dtype_name, SymInt block_size, ScalarType target_dtype, "
    "SymInt block_dim) -> Tensor",
).register_fake(_dequantize)
