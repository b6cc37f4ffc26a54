"""The element formats of the OCP specification under the names that TorchMX gives them."""

from pt2mx.formats import FORMATS

float8_e4m3 = FORMATS["fp8_e4m3"]
float8_e5m2 = FORMATS["fp8_e5m2"]
float6_e3m2 = FORMATS["fp6_e3m2"]
float6_e2m3 = FORMATS["fp6_e2m3"]
float4_e2m1 = FORMATS["fp4_e2m1"]
int8 = FORMATS["int8"]
