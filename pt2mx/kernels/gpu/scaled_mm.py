"""Matmuls of packed activations and packed weights on NVIDIA GPUs of the Blackwell generation, by torch's operator.

Untested on hardware: shapes, layouts and dtypes are checked against what torch's operator says it takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.kernels.scaled_mm import FORMS


def matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    elements: tuple[str, str],
    dtype: torch.dtype,
) -> Tensor:
    """Return x times the weight, as `pt2mx.kernels.scaled_mm.matmul`."""
    form = FORMS[elements]
    is_fused = bias is not None and dtype in form.biased
    y = functional.scaled_mm(
        x.contiguous().view(form.x),  # codes lie in memory as their values did
        weight.contiguous().view(form.weight).t(),
        x_scale.view(torch.float8_e8m0fnu),
        functional.ScalingType.BlockWise1x32,
        weight_scale.view(torch.float8_e8m0fnu),
        functional.ScalingType.BlockWise1x32,
        functional.SwizzleType.SWIZZLE_32_4_4,
        functional.SwizzleType.SWIZZLE_32_4_4,
        bias=bias if is_fused else None,
        output_dtype=dtype,
    )
    return y if bias is None or is_fused else y + bias
