"""Matmuls whose products are added in a register of limited precision, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from pt2mx.accumulator import Accumulator
from pt2mx.kernels.gpu.accumulated_matmul_kernel import Matrices, Register, accumulated_matmul_kernel
from pt2mx.kernels.gpu.aligned_products_kernel import GROUP, Factors, chained_matmul_kernel, look_at_factors

if TYPE_CHECKING:
    from pt2mx.ops.accumulated import MatmulAccumulated


#: rows and columns of a program's tile, and its warps
_ROWS, _COLUMNS, _WARPS = 64, 64, 4
#: most products that tensor cores add at once
_STEP = 32
#: products that float32 cuts in a round of the loop
_UNROLL = 16
#: registers of a thread, with which three programs run on a multiprocessor
_REGISTERS = 168
#: most fraction bits of a register with which float32 holds the sum of a group, and fewest products of a group, which
#: are padded to 32
_SHORT, _FEWEST = 14, 8
#: most programs of a launch in its second and third dimension
_MOST_PROGRAMS = 65535


def matmul(call: MatmulAccumulated[Tensor], accumulator: Accumulator) -> Tensor | None:
    """x: (*batch, M, K), other: (*batch, K, N) -> (*batch, M, N) float32; None: too large for a launch."""
    x, other, k = call.x.float(), call.other.float(), call.x.shape[-1]
    out = x.new_zeros(call.result_shape, dtype=torch.float32)
    if not out.numel() or not k:
        return out
    if other.dim() == 2:  # all rows are those of one batch
        x = x.reshape(-1, k)
    if other.dim() > 2:
        x, other = (tensor.expand(*out.shape[:-2], *tensor.shape[-2:]) for tensor in (x, other))
    x, other = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (x, other))
    batch, m, n = len(x), x.shape[1], other.shape[2]
    group, promotion = min(accumulator.group, k), min(accumulator.promotion, k)
    if max(batch, triton.cdiv(n, _COLUMNS)) > _MOST_PROGRAMS:
        return None
    integer, fraction = ((0, 0) + accumulator.numbers)[-2:]
    padded = _FEWEST <= group <= GROUP.value and triton.cdiv(k, group) <= _MOST_PROGRAMS
    short = accumulator.kind == "hopper" and fraction <= _SHORT and padded
    step = _STEP if accumulator.group > _STEP // 2 else _STEP // 2
    register = Register(accumulator.kind, integer, fraction, _ROWS, _COLUMNS, step, short, _UNROLL)
    sizes = m, n, k, group, promotion
    grid = triton.cdiv(m, _ROWS), triton.cdiv(n, _COLUMNS), batch
    with torch.cuda.device_of(x):
        left = of_x = of_other = None
        if short:
            of_x, of_other = _factors(x.mT, group, _ROWS, True), _factors(other, group, _COLUMNS, False)
            left = out.new_empty(batch, *grid[:2], dtype=torch.int32)
            arguments = out, left, of_x, of_other, sizes, register
            chained_matmul_kernel[grid](*arguments, num_warps=_WARPS, maxnreg=_REGISTERS)
        matrices = Matrices(x, *x.stride()), Matrices(other, *other.stride())
        accumulated_matmul_kernel[grid](*matrices, out, left, of_x, of_other, sizes, register, num_warps=_WARPS)
    return out


def _factors(matrix: Tensor, group: int, tile: int, of_x: bool) -> Factors:
    """matrix: (batch, k, size) -> its factors, for tiles of that many rows or columns."""
    batch, k, size = matrix.shape
    groups, tiles = triton.cdiv(k, group), triton.cdiv(size, tile)
    shape = batch, groups, tiles, GROUP.value, tile
    powers, signs = matrix.new_empty(2, *shape, dtype=torch.bfloat16)
    factors = Factors(
        *(matrix.new_empty(shape), powers, signs),
        matrix.new_empty(batch, groups, tiles, tile, dtype=torch.int32),
        matrix.new_empty(batch, groups, tiles, dtype=torch.int32),
    )
    look_at_factors[tiles, groups, batch](matrix, matrix.stride(), factors, (k, size, group), of_x, tile)
    return factors
