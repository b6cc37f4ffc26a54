"""The Triton kernel of matmuls whose products are added in a register of limited precision.

`pt2mx.kernels.accumulated_matmul` is the definition. A program computes a tile of the result. Tensor cores add the
products of a group in float64, in an order of their own, which matters only where float64 rounds the sum. Those that
`hopper` aligns are cut one after the other, here where `chained_matmul_kernel` left a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from pt2mx.kernels.gpu.aligned_products_kernel import Places, aligned


class Matrices(NamedTuple):
    """A tensor (batch, rows, columns) and its strides."""

    pointer: Any
    batch: int
    row: int
    column: int


class Register(NamedTuple):
    """The compile-time values of an accumulator, and the tile of a program."""

    KIND: str
    INTEGER: int  # bits
    FRACTION: int
    ROWS: int
    COLUMNS: int
    STEP: int  # products that tensor cores add at once
    SHORT: bool  # whether float32 may cut the products of a group
    UNROLL: int  # products that it cuts in a round of the loop


@triton.jit
def accumulated_matmul_kernel(x, other, out, left, of_x, of_other, sizes, C: tl.constexpr):
    """x: (batch, m, k), other: (batch, k, n) -> out: (batch, m, n) float32, contiguous.

    `left`: which tiles to compute, and `of_x`, `of_other`: the factors, where `C.SHORT`. `sizes`: m, n, k, the products
    of a group, and those until the register is added to the result.
    """
    if C.SHORT:
        tile = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
        if tl.load(left + tile) == 0:
            return
    m, n, k, group, promotion = sizes
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    columns = tl.program_id(1) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    batch = tl.program_id(2).to(tl.int64)
    x_rows = x.pointer + batch * x.batch + rows.to(tl.int64) * x.row
    other_columns = other.pointer + batch * other.batch + columns.to(tl.int64) * other.column
    in_rows, in_columns = rows < m, columns < n
    places = Places(x_rows, other_columns, in_rows, in_columns, x.column, other.row)
    total = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float32)
    groups = batch * tl.cdiv(k, group)
    for start in range(0, k, promotion):
        # float32 holds what is rounded to a register, except for wide fixed-point numbers
        register = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float64 if C.KIND == "fixed" else tl.float32)
        stop = tl.minimum(start + promotion, k)
        for first in range(start, stop, group):
            end = tl.minimum(first + group, stop)
            if C.KIND == "hopper":
                register = aligned(register, places, first, end, groups + first // group, of_x, of_other, C)
            else:
                exact = register.to(tl.float64)
                for i in range(first, end, C.STEP):
                    indices = (i + tl.arange(0, C.STEP)).to(tl.int64)
                    some = indices < end
                    a_mask, b_mask = in_rows[:, None] & some[None, :], some[:, None] & in_columns[None, :]
                    a = tl.load(x_rows[:, None] + indices[None, :] * x.column, mask=a_mask, other=0.0)
                    b = tl.load(other_columns[None, :] + indices[:, None] * other.row, mask=b_mask, other=0.0)
                    exact = tl.dot(a.to(tl.float64), b.to(tl.float64), exact, out_dtype=tl.float64)
                register = tl.where(tl.abs(exact) < float("inf"), _rounded(exact, C), exact).to(register.dtype)
        total += register.to(tl.float32)
    at = out + (batch * m + rows.to(tl.int64))[:, None] * n + columns[None, :]
    tl.store(at, total, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _rounded(y, C: tl.constexpr):
    """Round finite sums, float64, to the register."""
    if C.KIND == "fixed":
        scale: tl.constexpr = 2.0**C.FRACTION
        end: tl.constexpr = 2.0 ** (C.INTEGER + C.FRACTION)
        most = tl.full([], end - 1, tl.float64)  # minimum() takes a number for float32
        return tl.minimum(tl.maximum(libdevice.rint(y * scale), -end), most) / scale
    y = y.to(tl.float32)
    if C.KIND == "bfloat16":
        y = y.to(tl.bfloat16).to(tl.float32)
    if C.KIND == "float16":
        y = y.to(tl.float16).to(tl.float32)
    return y.to(tl.float64)
