"""Matmuls whose products are added in a register of limited precision, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from pt2mx.accumulator import Accumulator
from pt2mx.kernels.gpu.accumulated_matmul_kernel import GROUP, Matrices, Register, accumulated_matmul_kernel

if TYPE_CHECKING:
    from pt2mx.ops.accumulated import MatmulAccumulated


#: rows and columns of a program's tile, and its warps, where products are cut one by one, and where tensor cores add
#: them; within 3% of the fastest of 16 and of six that were tried on an H200
_ONE_BY_ONE, _TOGETHER = (32, 64, 2), (64, 64, 4)
#: most products that tensor cores add at once
_STEP = 32
#: products that float32 cuts in a round of the loop
_UNROLL = 4
#: most fraction bits of a register with which float32 holds the sum of a group
_SHORT = 16
#: most programs of a launch in its second and third dimension
_MOST_PROGRAMS = 65535


def matmul(call: MatmulAccumulated[Tensor], accumulator: Accumulator) -> Tensor | None:
    """x: (*batch, M, K), other: (*batch, K, N) -> (*batch, M, N) float32; None: too large for a launch."""
    x, other, k = call.x, call.other, call.x.shape[-1]
    out = x.new_zeros(call.result_shape, dtype=torch.float32)
    if not out.numel() or not k:
        return out
    if other.dim() == 2:  # all rows are those of one batch
        x = x.reshape(-1, k)
    if accumulator.kind == "hopper":  # a program reads a column of x and a row of other at a time
        x, other = x.mT.contiguous().mT, other.contiguous()
    if other.dim() > 2:
        x, other = (tensor.expand(*out.shape[:-2], *tensor.shape[-2:]) for tensor in (x, other))
    x, other = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (x, other))
    batch, m, n = len(x), x.shape[1], other.shape[2]
    rows, columns, warps = _ONE_BY_ONE
    if accumulator.kind != "hopper":
        rows, columns, warps = _TOGETHER
        x, other = x.float(), other.float()  # Triton 3.6 compiles no dot in float64 of narrower values
    if max(batch, triton.cdiv(n, columns)) > _MOST_PROGRAMS:
        return None
    integer, fraction = ((0, 0) + accumulator.numbers)[-2:]
    step = _STEP if accumulator.group > _STEP // 2 else _STEP // 2
    short = accumulator.kind == "hopper" and fraction <= _SHORT and accumulator.group <= GROUP.value
    register = Register(accumulator.kind, integer, fraction, rows, columns, step, short, _UNROLL)
    sizes = m, n, k, min(accumulator.group, k), min(accumulator.promotion, k)
    grid = triton.cdiv(m, rows), triton.cdiv(n, columns), batch
    with torch.cuda.device_of(x):
        accumulated_matmul_kernel[grid](
            Matrices(x, *x.stride()), Matrices(other, *other.stride()), out, sizes, register, num_warps=warps
        )
    return out
