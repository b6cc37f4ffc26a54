"""All operators of one tensor, with scales other than E8M0, and the values that are hard for them."""

import torch
from torch import Tensor

from pt2mx import dequantize_mx, fake_quantize_mx, parse, quantize_mx, tensor_scale_mx

#: a text for each scale format and each shape of blocks; the block sizes divide no length below
NAMES = (
    "nvfp4", "fp4_e2m1{16}(e4m3_f32_divisor)", "fp8_e4m3{16}(e4m3)", "fp4_e2m1{16}(e5m3)", "fp8_e4m3{16x32}(f32)",
    "int4{32}(bf16)", "int8{32}(f16)", "fp8_e4m3{32x32}",
)  # fmt: skip


def values(rows: int = 40, columns: int = 70) -> Tensor:
    """Values of many magnitudes, a block of zeros, one of subnormals, an Inf and a NaN."""
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.randn(rows, -(-columns // 8), generator=generator).mul(4).exp().repeat_interleave(8, 1)
    x = torch.randn(rows, columns, generator=generator) * magnitude[:, :columns]
    x[3, 5], x[4, 50], x[7], x[8] = torch.inf, torch.nan, 0.0, x[8] * 1e-30
    return x


def through_float_scale_operators(x: Tensor, name: str, scale_mode: str | None = None) -> tuple[Tensor, ...]:
    """(scale, data, dequantize, fake_quantize, fake_quantize by a tensor scale) of x, after other, exact operators."""
    spec, x = parse(name, **({} if scale_mode is None else {"scale_mode": scale_mode})), torch.where(x == 7, -x, x)
    t = tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    scale, data = quantize_mx(x, spec, tensor_scale=t)
    values = dequantize_mx(data, scale, spec, tensor_scale=t, length=x.shape[-1])
    return scale, data, values, fake_quantize_mx(x, spec), fake_quantize_mx(x, spec, tensor_scale=t) * 2
