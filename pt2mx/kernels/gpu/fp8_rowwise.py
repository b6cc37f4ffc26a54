"""FP8 rows (`pt2mx.kernels.fp8_rowwise`) on an NVIDIA GPU: one pass over memory makes them, torch's FP8 matmul
multiplies them.

The matmul adds its partial sums in float32 (`use_fast_accum=False`). A last kernel computes the rows that do not fit,
usually none. Nothing waits for the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.kernels.fp8_rowwise import E4M3, ROOMS
from pt2mx.kernels.gpu import activations
from pt2mx.kernels.gpu.activations_kernel import Norm
from pt2mx.kernels.gpu.device import uses_pdl
from pt2mx.kernels.gpu.fp8_rowwise_kernel import quantize_rows_kernel, unfit_rows_kernel
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.fp8_rowwise import LayerNormFP8Rows, MmFP8Rows, QuantizeFP8Rows


@dataclass(frozen=True)
class Unfit:
    """The compile-time values of `unfit_rows_kernel`."""

    pdl: bool
    has_bias: bool
    scanned: int = 4096  # rows that the kernel checks together
    rows: int = 16
    columns: int = 64
    depth: int = 64


def quantize(call: QuantizeFP8Rows[Tensor], spec: MXSpec) -> tuple[Tensor, Tensor, Tensor] | None:
    if not activations.supports(spec, call.x):
        return None
    rows, room = _empty_rows(call.x), ROOMS[spec.element.name]._asdict()
    activations.launch(quantize_rows_kernel, call.x, rows, spec, activation=call.activation, **room)
    return rows


def layer_norm_quantize(call: LayerNormFP8Rows[Tensor], spec: MXSpec) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    x, of_norm = call.x, (call.residual, call.weight, call.bias)
    if not activations.supports(spec, x, *of_norm):
        return None
    rows, normed = _empty_rows(x), x.new_empty(x.shape)
    room = ROOMS[spec.element.name]._asdict()
    activations.launch(quantize_rows_kernel, x, rows, spec, Norm(normed, *of_norm, call.eps), **room)
    return normed, *rows


_unfit = functools.lru_cache(Unfit)


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return codes, scale, x.new_empty(x.shape)


def mm(call: MmFP8Rows[Tensor]) -> Tensor | None:
    """K and N are multiples of 16. Return None unless unfit and bias are in bfloat16."""
    codes, scale, unfit, weight_codes, weight_scale, bias = call.args
    if unfit.dtype != torch.bfloat16:
        return None
    (n, k), m = weight_codes.shape, scale.numel()
    if not m:
        return unfit.new_empty((*codes.shape[:-1], n))
    weight_codes, bias = weight_codes.contiguous(), None if bias is None else bias.contiguous()
    x, weight = codes.contiguous().view(m, k).view(E4M3), weight_codes.view(E4M3).t()
    scales = scale.contiguous().view(m, 1), weight_scale.contiguous().view(1, n)
    out = torch._scaled_mm(x, weight, *scales, bias=bias, out_dtype=unfit.dtype)
    config = _unfit(uses_pdl(x.device), bias is not None)
    arguments = scales[0], unfit.contiguous(), weight_codes, scales[1], bias, out
    with torch.cuda.device_of(x):
        grid = (-(-n // config.columns),)
        unfit_rows_kernel[grid](*arguments, m, n, k, config, num_warps=8, launch_pdl=config.pdl)
    return out.view(*codes.shape[:-1], n)
