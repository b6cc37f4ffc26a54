"""Activations and layer norms that are quantized where they are computed.

The functions here define the operators of `pt2mx.ops.quantized_activations`, for every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.kernels.fp8_rows import ACTIVATIONS, BLOCK
from pt2mx.kernels.select import kernels_for
from pt2mx.modes import SCALE_MODES
from pt2mx.spec import MXSpec

#: values of a row that a program of the GPU's holds
_LONGEST_ROW = 1 << 15


def suits_gpu(spec: MXSpec, length: object, *dtypes: torch.dtype) -> bool:
    """True if the kernels for NVIDIA GPUs serve rows of a length, where all they read is in `dtypes`."""
    element, mode = spec.element, SCALE_MODES[spec.scale_mode]
    whole = isinstance(length, int) and length % BLOCK == 0 and length <= _LONGEST_ROW and spec.block_size == BLOCK
    in_pairs = element.mantissa_bits <= 6 and element.lowest == -element.max_normal and not element.is_wide
    return whole and in_pairs and spec.rounding == "even" and not mode.searches and set(dtypes) == {torch.bfloat16}


def activation_fake_quantize(x: Tensor, activation: str, spec: MXSpec, dtype: torch.dtype) -> Tensor:
    """x: (..., K) -> quantized values of an activation of it, in `dtype`. Activations are rounded to x's dtype."""
    wide = ACTIVATIONS[activation](x).to(torch.promote_types(x.dtype, dtype))
    return kernels_for(x, spec.element).fake_quantize(wide, spec, None).to(dtype)


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
