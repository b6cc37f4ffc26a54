"""The element formats of the OCP specification under the names that TorchMX gives them."""

from pt2mx.torchmx.dtypes import (
    STR_TO_SUPPORTED_ELEM_DTYPE,
    SUPPORTED_ELEM_DTYPES,
    DType,
    float4_e2m1,
    float6_e2m3,
    float6_e3m2,
    float8_e4m3,
    float8_e5m2,
    int8,
)

__all__ = [
    "STR_TO_SUPPORTED_ELEM_DTYPE",
    "SUPPORTED_ELEM_DTYPES",
    "DType",
    "float4_e2m1",
    "float6_e2m3",
    "float6_e3m2",
    "float8_e4m3",
    "float8_e5m2",
    "int8",
]
