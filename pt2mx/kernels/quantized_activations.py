"""Activations and layer norms with fused quantization.

The functions here define the operators of `pt2mx.ops.activations`, for every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.kernels.select import run_kernel
from pt2mx.spec import MXSpec


def activation_fake_quantize(x: Tensor, activation: str, spec: MXSpec, dtype: torch.dtype) -> Tensor:
    """x: (..., K) -> the quantized activation of x, in `dtype`. The activation is rounded to x's dtype first."""
    wide = ACTIVATIONS[activation](x).to(torch.promote_types(x.dtype, dtype))
    return run_kernel("fake_quantize_mx", wide, spec, None).to(dtype)


def layer_norm_fake_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    spec: MXSpec,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """x, residual: (..., K), weight, bias: (K,) -> the layer norm of x + residual, and its quantized values."""
    x = x if residual is None else x + residual
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return normed, activation_fake_quantize(normed, "none", spec, dtype)
