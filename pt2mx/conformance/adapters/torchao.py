"""torchao: `to_mx` and `to_dtype` of its prototype `mx_formats`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torchao.prototype.mx_formats import constants
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

from pt2mx.conformance.adapters.case import Case

_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp6_e3m2": getattr(constants, "DTYPE_FP6_E3M2", None),
    "fp6_e2m3": getattr(constants, "DTYPE_FP6_E2M3", None),
    "fp4_e2m1": torch.float4_e2m1fn_x2,
}


def cases() -> Iterator[Case]:
    """Yield each format with each of torchao's scale modes."""
    for name, dtype in _DTYPES.items():
        for mode in ScaleCalculationMode if dtype is not None else ():
            quantize = partial(_quantize, dtype, mode)
            yield Case(name, quantize, partial(_dequantize, dtype), mode.value)


def _quantize(dtype: object, mode: ScaleCalculationMode, x: Tensor) -> tuple[Tensor, Tensor]:
    return to_mx(x, dtype, 32, mode)


def _dequantize(dtype: object, data: Tensor, scale: Tensor) -> Tensor:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2:
        data = data.view(dtype)
    return to_dtype(data, scale.view(torch.float8_e8m0fnu), dtype, 32, torch.float32)
