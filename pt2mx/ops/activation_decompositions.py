"""Quantized activations and FP8 rows as functions of other operators, for programs that hold no such calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from pt2mx import ops
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS, E4M3, UNFIT
from pt2mx.ops.fp8_rows import layer_norm_fp8_rows, mm_fp8_rows, quantize_fp8_rows
from pt2mx.ops.quantized_activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx


def _activation(
    x: Tensor,
    activation: str,
    elem: str,
    block_size: int,
    scale_mode: str = "floor",
    rounding: str = "even",
    target_dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = target_dtype or x.dtype
    y = ACTIVATIONS[activation](x).to(torch.promote_types(x.dtype, dtype))
    return ops.fake_quantize_mx(y, elem, block_size, -1, scale_mode, rounding).to(dtype)


def _layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *modes: Any
) -> tuple[Tensor, Tensor]:
    normed = _normed(x, residual, weight, bias, eps)
    return normed, _activation(normed, "none", *modes)


def _fp8_rows(
    x: Tensor, elem: str, scale_mode: str = "floor", rounding: str = "even", activation: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that do not fit, all of them: `_mm_fp8_rows` reads their values."""
    scale = x.new_full((*x.shape[:-1], 1), UNFIT, dtype=torch.float32)
    return torch.zeros_like(x, dtype=torch.uint8), scale, _activation(x, activation, elem, BLOCK, scale_mode, rounding)


def _layer_norm_fp8_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *modes: str
) -> tuple[Tensor, ...]:
    normed = _normed(x, residual, weight, bias, eps)
    return normed, *_fp8_rows(normed, *modes)


def _mm_fp8_rows(
    data: Tensor, scale: Tensor, rest: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    values, dense = (codes.view(E4M3).to(torch.float32) * s for codes, s in ((data, scale), (weight, weight_scale)))
    return functional.linear(torch.where(scale < 0, rest, values.to(rest.dtype)), dense.to(rest.dtype), bias)


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    x = x if residual is None else x + residual
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


#: operator -> its decomposition
ACTIVATION_DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    activation_fake_quantize_mx: _activation,
    layer_norm_fake_quantize_mx: _layer_norm,
    quantize_fp8_rows: _fp8_rows,
    layer_norm_fp8_rows: _layer_norm_fp8_rows,
    mm_fp8_rows: _mm_fp8_rows,
}
