"""Matmuls of packed activations and packed weights on NVIDIA GPUs of the Blackwell generation, by torch's operator.

Untested on hardware: shapes, layouts and dtypes are checked against what torch's operator says it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.kernels.scaled_mm import FORMS

if TYPE_CHECKING:
    from pt2mx.ops.scaled_mm import ScaledMM


def matmul(call: ScaledMM[Tensor]) -> Tensor:
    bias, dtype, form = call.bias, call.target_dtype, FORMS[call.x_element, call.weight_element]
    is_fused = bias is not None and dtype in form.biased
    x = call.x.reshape(-1, call.x.shape[-1])
    y = functional.scaled_mm(
        x.contiguous().view(form.x),  # codes lie in memory as their values did
        call.weight.contiguous().view(form.weight).t(),
        call.x_scale.view(torch.float8_e8m0fnu),
        functional.ScalingType.BlockWise1x32,
        call.weight_scale.view(torch.float8_e8m0fnu),
        functional.ScalingType.BlockWise1x32,
        functional.SwizzleType.SWIZZLE_32_4_4,
        functional.SwizzleType.SWIZZLE_32_4_4,
        bias=bias if is_fused else None,
        output_dtype=dtype,
    )
    return (y if bias is None or is_fused else y + bias).view(call.result_shape)
