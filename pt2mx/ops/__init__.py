"""The operators `torch.ops.pt2mx.*`. A class declares one (`pt2mx.ops.operator`); `pt2mx.ops.contract` lists all."""

from pt2mx.ops.quantization import (
    clip_gradient_mx,
    dequantize_mx,
    fake_quantize_mx,
    quantize_mx,
)
from pt2mx.ops.stochastic import random_bits
from pt2mx.ops.tensor_scale import tensor_scale_mx

__all__ = [
    "clip_gradient_mx",
    "dequantize_mx",
    "fake_quantize_mx",
    "quantize_mx",
    "random_bits",
    "tensor_scale_mx",
]
