"""The Triton kernel of matmuls whose products are added in a register of limited precision.

`pt2mx.kernels.accumulated_matmul` is the definition. A program computes a tile of the result. Tensor cores add the
products of a group in float64, in an order of their own, which matters only where float64 rounds the sum. The products
that `hopper` aligns are cut one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

_BIAS: tl.constexpr = tl.constexpr(1023)
_MANTISSA: tl.constexpr = tl.constexpr(52)
_EXPONENT: tl.constexpr = tl.constexpr(0x7FF)
#: as in the definition
_FAR: tl.constexpr = tl.constexpr(400)


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


@triton.jit
def accumulated_matmul_kernel(x, other, out, sizes, C: tl.constexpr):
    """x: (batch, m, k), other: (batch, k, n) -> out: (batch, m, n) float32, contiguous. `sizes`: m, n, k, the products
    of a group, and those until the register is added to the result."""
    m, n, k, group, promotion = sizes
    rows = tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)
    columns = tl.program_id(1) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    batch = tl.program_id(2).to(tl.int64)
    x_rows = x.pointer + batch * x.batch + rows.to(tl.int64) * x.row
    other_columns = other.pointer + batch * other.batch + columns.to(tl.int64) * other.column
    in_rows, in_columns = rows < m, columns < n
    total = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float32)
    for start in range(0, k, promotion):
        register = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float64)
        stop = tl.minimum(start + promotion, k)
        for first in range(start, stop, group):
            end = tl.minimum(first + group, stop)
            if C.KIND == "hopper":
                largest = _exponent(register)
                for i in range(first, end):
                    a, b = _factors(x_rows, other_columns, in_rows, in_columns, i, x.column, other.row)
                    largest = tl.maximum(largest, _exponent(a)[:, None] + _exponent(b)[None, :])
                largest = tl.minimum(tl.maximum(largest, -_FAR), _FAR) - C.FRACTION
                unit, units = _power_of_two(largest), _power_of_two(-largest)
                register = libdevice.trunc(register * units)
                for i in range(first, end):
                    a, b = _factors(x_rows, other_columns, in_rows, in_columns, i, x.column, other.row)
                    register += libdevice.trunc(a[:, None] * b[None, :] * units)
                register *= unit
            else:
                for i in range(first, end, C.STEP):
                    indices = (i + tl.arange(0, C.STEP)).to(tl.int64)
                    some = indices < end
                    a_mask, b_mask = in_rows[:, None] & some[None, :], some[:, None] & in_columns[None, :]
                    a = tl.load(x_rows[:, None] + indices[None, :] * x.column, mask=a_mask, other=0.0)
                    b = tl.load(other_columns[None, :] + indices[:, None] * other.row, mask=b_mask, other=0.0)
                    register = tl.dot(a.to(tl.float64), b.to(tl.float64), register, out_dtype=tl.float64)
            register = tl.where(tl.abs(register) < float("inf"), _rounded(register, C), register)
        total += register.to(tl.float32)
    at = out + (batch * m + rows.to(tl.int64))[:, None] * n + columns[None, :]
    tl.store(at, total, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _factors(x_rows, other_columns, in_rows, in_columns, i, x_stride, other_stride):
    """Return the i-th column of x, (ROWS,), and row of other, (COLUMNS,), as float64."""
    i = i.to(tl.int64)
    a = tl.load(x_rows + i * x_stride, mask=in_rows, other=0.0)
    b = tl.load(other_columns + i * other_stride, mask=in_columns, other=0.0)
    return a.to(tl.float64), b.to(tl.float64)


@triton.jit
def _exponent(x):
    return ((x.to(tl.int64, bitcast=True) >> _MANTISSA) & _EXPONENT).to(tl.int32) - _BIAS


@triton.jit
def _power_of_two(exponent):
    return ((exponent + _BIAS).to(tl.int64) << _MANTISSA).to(tl.float64, bitcast=True)


@triton.jit
def _rounded(y, C: tl.constexpr):
    """Round finite sums, float64, to the register."""
    if C.KIND == "fixed":
        scale: tl.constexpr = 2.0**C.FRACTION
        end: tl.constexpr = 2.0 ** (C.INTEGER + C.FRACTION)
        most = tl.full([], end - 1, tl.float64)  # minimum() takes a number for float32
        return tl.minimum(tl.maximum(libdevice.rint(y * scale), -end), most) / scale
    if C.KIND == "hopper":
        tail: tl.constexpr = _MANTISSA - C.FRACTION
        y = (y.to(tl.int64, bitcast=True) >> tail << tail).to(tl.float64, bitcast=True)
    y = y.to(tl.float32)
    if C.KIND == "bfloat16":
        y = y.to(tl.bfloat16).to(tl.float32)
    if C.KIND == "float16":
        y = y.to(tl.float16).to(tl.float32)
    return y.to(tl.float64)
