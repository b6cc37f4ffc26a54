"""TorchMX's descriptions of dtypes, from pt2mx's own table. Functions accept them as elements.

The module adds `float8_e5m2`, and has TorchMX's lists of supported dtypes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from pt2mx.formats import FORMATS, ElementFormat
from pt2mx.kernels.elements import NAN_SCALE

_TORCH_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}


@dataclass(frozen=True, repr=False)
class DType:
    """A dtype by its numbers, as `torchmx.dtypes.DType` of TorchMX describes it.

    Args:
        name: the result of `str`, too.
        max: the largest value; for an integer in whole numbers, without the factor that MX implies.
        max_pow2: the exponent of `max`.
        exponent_bias, exponent_bits, mantissa_bits: of an integer 0, 0 and the bits without the sign.
        has_nan, has_inf: true if codes for them exist.
        torch_dtype: torch's own dtype, if it has at least one byte.

    Example:
        >>> from pt2mx import dtypes
        >>> dtypes.float6_e3m2
        float6_e3m2
        >>> dtypes.float6_e3m2.max, dtypes.float6_e3m2.exponent_bias, dtypes.int8.max
        (28.0, 3, 127.0)
    """

    name: str
    max: float
    max_pow2: int
    exponent_bias: int
    exponent_bits: int
    mantissa_bits: int
    has_nan: bool
    has_inf: bool
    torch_dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        return self.name


@functools.cache
def dtype_of(element: ElementFormat) -> DType:
    """Return TorchMX's description of an MX element, always the same object for one element."""
    whole = element.bits - 2 if element.is_int else 0  # an MX integer is a multiple of 2**-whole
    return DType(
        name=element.name.replace("fp", "float"),
        max=element.max_normal * 2**whole,
        max_pow2=element.emax + whole,
        exponent_bias=0 if element.is_int else element.bias,
        exponent_bits=0 if element.is_int else element.exponent_bits,
        mantissa_bits=element.bits - 1 if element.is_int else element.mantissa_bits,
        has_nan=element.has_nan,
        has_inf=element.has_inf,
        torch_dtype=_TORCH_DTYPES.get(element.name),
    )


def _ieee(name: str, exponent_bits: int, mantissa_bits: int, torch_dtype: torch.dtype | None = None) -> DType:
    bias = 2 ** (exponent_bits - 1) - 1
    largest = 2.0**bias * (2 - 2.0**-mantissa_bits)
    return DType(name, largest, bias, bias, exponent_bits, mantissa_bits, True, True, torch_dtype)


float8_e4m3 = dtype_of(FORMATS["fp8_e4m3"])
float8_e5m2 = dtype_of(FORMATS["fp8_e5m2"])
float6_e3m2 = dtype_of(FORMATS["fp6_e3m2"])
float6_e2m3 = dtype_of(FORMATS["fp6_e2m3"])
float4_e2m1 = dtype_of(FORMATS["fp4_e2m1"])
int8 = dtype_of(FORMATS["int8"])

SUPPORTED_FP_ELEM_DTYPES = (float8_e4m3, float6_e3m2, float6_e2m3, float4_e2m1)
SUPPORTED_ELEM_DTYPES = (*SUPPORTED_FP_ELEM_DTYPES, int8)
STR_TO_SUPPORTED_ELEM_DTYPE = {dtype.name: dtype for dtype in SUPPORTED_ELEM_DTYPES}

# the base dtypes of elements, and the dtype of scales
float64 = _ieee("float64", 11, 52, torch.float64)
float32 = _ieee("float32", 8, 23, torch.float32)
bfloat16 = _ieee("bfloat16", 8, 7, torch.bfloat16)
float22_e8m13 = _ieee("float22_e8m13", 8, 13)
e8m0 = DType("e8m0", 2.0**127, 127, 127, 8, 0, has_nan=True, has_inf=False)
E8M0_EXPONENT_NAN_VAL = NAN_SCALE
