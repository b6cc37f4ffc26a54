"""A panel of GPTQ on an NVIDIA GPU, in Triton: one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.gpu.gptq_panel_kernel import gptq_panel_kernel
from pt2mx.kernels.gpu.quantize import Tile, constants_of
from pt2mx.spec import MXSpec

#: values of a column that a program rounds
_VALUES = 8


def round_panel(columns: Tensor, factor: Tensor, scale: Tensor, spec: MXSpec, *bounds: Tensor) -> tuple[Tensor, Tensor]:
    columns, factor, scale, *ends = (tensor.contiguous() for tensor in (columns, factor, scale, *bounds))
    rounded, errors = torch.empty_like(columns), torch.empty_like(columns)
    if not columns.numel():
        return rounded, errors
    groups, width, n = columns.shape
    low, high = ends or (None, None)
    constants = constants_of(spec, (1, 1), BLOCK, 1, False, Tile(_VALUES, 1))
    with torch.cuda.device_of(columns):
        grid = (triton.cdiv(n, _VALUES), groups)
        gptq_panel_kernel[grid](
            *(columns, factor, scale, low, high, rounded, errors, width, n),
            *(triton.next_power_of_2(width), _VALUES, constants),
            num_warps=1,
            enable_fp_fusion=False,  # products by scales with a significand are rounded before they are subtracted
        )
    return rounded, errors
