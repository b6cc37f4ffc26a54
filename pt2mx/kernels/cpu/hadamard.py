"""Rotation within blocks on the CPU, in C++ (`src/hadamard.cpp`): one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.kernels.cpu.build import DTYPES, run
from pt2mx.kernels.cpu.calls import HadamardCall

if TYPE_CHECKING:
    from pt2mx.ops.hadamard import Hadamard


def hadamard(call: Hadamard[Tensor]) -> Tensor:
    return rotate(call.x, call.size, call.axis)


def rotate(x: Tensor, size: int, axis: int = -1) -> Tensor:
    x, axis = x.contiguous(), axis % x.dim()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    call = HadamardCall(
        dtype=DTYPES.index(x.dtype),
        outer=x.shape[:axis].numel(),
        n=x.shape[axis],
        inner=x.shape[axis + 1 :].numel(),
        size=size,
        x=x.data_ptr(),
        out=out.data_ptr(),
    )
    run("pt2mx_hadamard", call)
    return out
