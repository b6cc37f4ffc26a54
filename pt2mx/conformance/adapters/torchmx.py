"""TorchMX: `quantize_mx` and `dequantize_mx`, of bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torchmx import dtypes
from torchmx.mx_tensor import dequantize_mx, quantize_mx

from pt2mx.conformance.adapters.case import Case

_DTYPES = {
    "fp8_e4m3": dtypes.float8_e4m3,
    "fp6_e3m2": dtypes.float6_e3m2,
    "fp6_e2m3": dtypes.float6_e2m3,
    "fp4_e2m1": dtypes.float4_e2m1,
    "int8": dtypes.int8,
}


def cases() -> Iterator[Case]:
    """Yield each of its formats."""
    for name, dtype in _DTYPES.items():
        yield Case(name, partial(_quantize, dtype.name), partial(_dequantize, name, dtype.name), dtype="bfloat16")


def _quantize(dtype: str, x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_mx(x, dtype, 32)


def _dequantize(name: str, dtype: str, data: Tensor, scale: Tensor) -> Tensor:
    stored = torch.int8 if name == "int8" else torch.uint8
    return dequantize_mx(data.view(stored), scale, dtype, 32, torch.bfloat16, -1)
