"""ml_dtypes: casts to the element dtypes, without a scale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import ml_dtypes
import numpy as np

from pt2mx.conformance.adapters.case import Case

_DTYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def cases() -> Iterator[Case]:
    """Yield each element; scale bytes are read as `float8_e8m0fnu`."""
    for name, dtype in _DTYPES.items():
        quantize, dequantize = partial(_quantize, dtype), partial(_dequantize, dtype)
        yield Case(
            name,
            quantize,
            dequantize,
            packing="bytes" if "8" not in name else None,
            framework="numpy",
            elements_only=True,
        )


def _quantize(dtype: type, x: np.ndarray) -> np.ndarray:
    return x.astype(dtype).astype(np.float32)


def _dequantize(dtype: type, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    factors = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return data.view(dtype).astype(np.float32) * factors.repeat(32, -1)
