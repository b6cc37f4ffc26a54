"""FP8 rows (`pt2mx.kernels.fp8_rowwise`) on an NVIDIA GPU: one pass over memory makes them, torch's FP8 matmul
multiplies them.

The matmul adds its partial sums in float32 (`use_fast_accum=False`). A last kernel computes the rows that do not fit,
usually none. Nothing waits for the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.kernels.fp8_rowwise import E4M3, ROOMS
from pt2mx.kernels.gpu import activations
from pt2mx.kernels.gpu.activations_kernel import Norm
from pt2mx.kernels.gpu.fp8_rowwise_kernel import quantize_rows_kernel, unfit_rows_kernel
from pt2mx.spec import MXSpec


@dataclass(frozen=True)
class Unfit:
    """The compile-time values of `unfit_rows_kernel`."""

    pdl: bool
    has_bias: bool
    scanned: int = 4096  # rows that the kernel checks together
    rows: int = 16
    columns: int = 64
    depth: int = 64


def quantize(x: Tensor, spec: MXSpec, activation: str) -> tuple[Tensor, Tensor, Tensor] | None:
    if not activations.supports(spec, x):
        return None
    rows = _empty_rows(x)
    activations.launch(quantize_rows_kernel, x, rows, spec, activation=activation, **ROOMS[spec.element.name]._asdict())
    return rows


def layer_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, spec: MXSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    if not activations.supports(spec, x, residual, weight, bias):
        return None
    rows, normed = _empty_rows(x), x.new_empty(x.shape)
    room = ROOMS[spec.element.name]._asdict()
    activations.launch(quantize_rows_kernel, x, rows, spec, Norm(normed, residual, weight, bias, eps), **room)
    return normed, *rows


_unfit = functools.lru_cache(Unfit)


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return codes, scale, x.new_empty(x.shape)


def mm(
    codes: Tensor, scale: Tensor, unfit: Tensor, weight_codes: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor | None:
    """K and N are multiples of 16. Return None unless unfit and bias are in bfloat16."""
    if unfit.dtype != torch.bfloat16:
        return None
    (n, k), m = weight_codes.shape, scale.numel()
    if not m:
        return unfit.new_empty((*codes.shape[:-1], n))
    weight_codes, bias = weight_codes.contiguous(), None if bias is None else bias.contiguous()
    x, weight = codes.contiguous().view(m, k).view(E4M3), weight_codes.view(E4M3).t()
    scales = scale.contiguous().view(m, 1), weight_scale.contiguous().view(1, n)
    out = torch._scaled_mm(x, weight, *scales, bias=bias, out_dtype=unfit.dtype)
    config = _unfit(activations.uses_pdl(x.device), bias is not None)
    arguments = scales[0], unfit.contiguous(), weight_codes, scales[1], bias, out
    with torch.cuda.device_of(x):
        grid = (-(-n // config.columns),)
        unfit_rows_kernel[grid](*arguments, m, n, k, config, num_warps=8, launch_pdl=config.pdl)
    return out.view(*codes.shape[:-1], n)
