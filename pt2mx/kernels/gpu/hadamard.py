"""Rotation within blocks on an NVIDIA GPU, in Triton: one launch, one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from pt2mx.kernels import hadamard as definition
from pt2mx.kernels.gpu.device import uses_pdl
from pt2mx.kernels.gpu.kernels import rotate_kernel

if TYPE_CHECKING:
    from pt2mx.ops.hadamard import Hadamard


#: values per program and warps, for small and for large tensors; the fastest on an H200
_FEW, _MANY = (512, 4), (2048, 4)
_MANY_VALUES = 1 << 20
_LARGEST_BLOCK = 4096


def hadamard(call: Hadamard[Tensor]) -> Tensor:
    x, axis = call.x, call.axis
    if axis % x.dim() == x.dim() - 1:
        return rotate(x, call.size)
    return rotate(x.movedim(axis, -1), call.size).movedim(-1, axis).contiguous()


def rotate(x: Tensor, size: int) -> Tensor:
    """x: (..., n) -> x, rotated in blocks of the last dimension."""
    if size > _LARGEST_BLOCK or not x.numel():
        return definition.rotate(x, size)
    x = x.contiguous()
    out, count = torch.empty_like(x), x.numel()
    values, warps = _FEW if count < _MANY_VALUES else _MANY
    values = max(values, size)
    wide = count >= 2**31 - values
    use_pdl = uses_pdl(x.device)
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(count, values),)
        rotate_kernel[grid](x, out, count, values, size, wide, use_pdl, num_warps=warps, launch_pdl=use_pdl)
    return out
