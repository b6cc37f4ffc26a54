"""FP8 rows (`pt2mx.kernels.fp8_rows`) on an NVIDIA GPU: one pass over memory to make them, torch's product of them.

The product is that of tensor cores with sums in float32 (`use_fast_accum=False`). A last kernel computes the rows that
do not fit, and finds none in most calls; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pt2mx.kernels import fp8_rows
from pt2mx.kernels.fp8_rows import BLOCK, E4M3, ROOMS
from pt2mx.kernels.gpu.fp8_rows_kernel import quantize_rows_kernel, unfit_rows_kernel
from pt2mx.kernels.gpu.quantize import Tile, constants_of
from pt2mx.modes import SCALE_MODES
from pt2mx.spec import MXSpec

#: values of a program, at least; rows of fewer go together
_VALUES = 2048
_LONGEST_ROW = 1 << 15
#: values of a thread
_VALUES_PER_THREAD = 32


@dataclass(frozen=True)
class Rows:
    """The compile-time values of the kernels that make rows."""

    rows: int  # of a program
    blocks: int  # of a row, a power of two
    shift: int  # those of `fp8_rows.Room`
    spread: int
    pdl: bool
    activation: str = "none"
    norm: bool = False
    has_residual: bool = False
    has_weight: bool = False
    has_bias: bool = False


@dataclass(frozen=True)
class Unfit:
    """The compile-time values of `unfit_rows_kernel`."""

    pdl: bool
    has_bias: bool
    scanned: int = 2048  # rows that are looked at together
    rows: int = 16
    columns: int = 64
    depth: int = 64


def quantize(x: Tensor, spec: MXSpec, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """As `pt2mx.kernels.fp8_rows.quantize`."""
    if not _suits(x, spec):
        return fp8_rows.quantize(x, spec, activation)
    _, *rows = _quantize(x, spec, activation=activation)
    return rows[0], rows[1], rows[2]


def layer_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, spec: MXSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `pt2mx.kernels.fp8_rows.layer_norm_quantize`."""
    if not _suits(x, spec):
        return fp8_rows.layer_norm_quantize(x, residual, weight, bias, eps, spec)
    return _quantize(x, spec, residual, weight, bias, eps, norm=True)


def _suits(x: Tensor, spec: MXSpec) -> bool:
    plain = spec.rounding == "even" and not SCALE_MODES[spec.scale_mode].searches
    return plain and x.dtype == torch.bfloat16 and x.shape[-1] <= _LONGEST_ROW


def _quantize(
    x: Tensor,
    spec: MXSpec,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
    norm: bool = False,
    activation: str = "none",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, k = x.contiguous(), x.shape[-1]
    residual, weight, bias = (None if t is None else t.contiguous() for t in (residual, weight, bias))
    normed, rest = torch.empty_like(x) if norm else x, torch.empty_like(x)
    codes, scale = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if not x.numel():
        return normed, codes, scale, rest
    blocks, room = triton.next_power_of_2(k // BLOCK), ROOMS[spec.element.name]
    rows = max(1, _VALUES // (BLOCK * blocks))
    given = {"has_residual": residual is not None, "has_weight": weight is not None, "has_bias": bias is not None}
    config = Rows(rows, blocks, room.shift, room.spread, _uses_pdl(x), activation, norm, **given)
    constants = constants_of(spec, (1, 1), BLOCK, 1, False, Tile(BLOCK * blocks * rows, 1))
    with torch.cuda.device_of(x):
        quantize_rows_kernel[(triton.cdiv(scale.numel(), rows),)](
            *(x, residual, weight, bias, normed, codes, scale, rest, k, scale.numel(), eps, constants, config),
            num_warps=min(16, max(1, BLOCK * blocks * rows // (32 * _VALUES_PER_THREAD))),
            launch_pdl=config.pdl,
        )
    return normed, codes, scale, rest


def mm(
    codes: Tensor, scale: Tensor, rest: Tensor, weight_codes: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """As `pt2mx.kernels.fp8_rows.mm`, K and N multiples of 16, rest and bias in bfloat16."""
    (n, k), m = weight_codes.shape, scale.numel()
    if not m:
        return rest.new_empty((*codes.shape[:-1], n))
    weight_codes, bias = weight_codes.contiguous(), None if bias is None else bias.contiguous()
    x, weight = codes.contiguous().view(m, k).view(E4M3), weight_codes.view(E4M3).t()
    scales = scale.contiguous().view(m, 1), weight_scale.contiguous().view(1, n)
    out = torch._scaled_mm(x, weight, *scales, bias=bias, out_dtype=rest.dtype)
    config = Unfit(_uses_pdl(x), bias is not None)
    arguments = scales[0], rest.contiguous(), weight_codes, scales[1], bias, out
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(n, config.columns),)
        unfit_rows_kernel[grid](*arguments, m, n, k, config, num_warps=4, launch_pdl=config.pdl)
    return out.view(*codes.shape[:-1], n)


def _uses_pdl(x: Tensor) -> bool:
    return torch.cuda.get_device_capability(x.device)[0] >= 9
