"""Rotation within blocks on an NVIDIA GPU, in Triton: one launch, one pass over memory."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pt2mx.kernels.gpu.kernels import rotate_kernel
from pt2mx.kernels.select import run_kernel

__all__ = ["rotate"]

#: values per program and warps, for small and for large tensors; the fastest on an H200
_FEW, _MANY = (512, 4), (2048, 4)
_MANY_VALUES = 1 << 20
_LARGEST_BLOCK = 4096


def rotate(x: Tensor, size: int, axis: int = -1) -> Tensor | None:
    if size > _LARGEST_BLOCK or not x.numel():
        return None
    if axis % x.dim() != x.dim() - 1:
        return run_kernel("hadamard", x.movedim(axis, -1), size).movedim(-1, axis).contiguous()
    x = x.contiguous()
    out, count = torch.empty_like(x), x.numel()
    values, warps = _FEW if count < _MANY_VALUES else _MANY
    values = max(values, size)
    wide = count >= 2**31 - values
    use_pdl = torch.cuda.get_device_capability(x.device)[0] >= 9
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(count, values),)
        rotate_kernel[grid](x, out, count, values, size, wide, use_pdl, num_warps=warps, launch_pdl=use_pdl)
    return out
