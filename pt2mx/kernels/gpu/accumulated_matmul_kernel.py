"""The Triton kernel of matmuls whose products are added in a register of limited precision.

`pt2mx.kernels.accumulated_matmul` is the definition. A program computes a tile of the result. Tensor cores add the
products of a group in float64, in an order of their own, which matters only where float64 rounds the sum. The products
that `hopper` aligns are cut one after the other: in float32 where the exponents of a group allow it, because a fused
multiplication with 2**23 units as its summand, rounded toward zero, cuts a product at a unit.
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
_BIAS_32: tl.constexpr = tl.constexpr(127)
_MANTISSA_32: tl.constexpr = tl.constexpr(23)
_EXPONENT_32: tl.constexpr = tl.constexpr(0xFF)
_SIGN_32: tl.constexpr = tl.constexpr(-(2**31))
#: what float32 cuts: products of at most as many, of factors whose exponents are at most this far from zero, and sums
GROUP: tl.constexpr = tl.constexpr(32)
_NEAR: tl.constexpr = tl.constexpr(40)
_NEAR_SUM: tl.constexpr = tl.constexpr(100)
#: the exponent that stands for zero, below those of products and sums
_OF_ZERO: tl.constexpr = tl.constexpr(-200)
#: the binary digits of a digit that counts up to GROUP products
_DIGIT: tl.constexpr = tl.constexpr(6)


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
        # float32 holds what is rounded to a register, except for wide fixed-point numbers
        register = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float64 if C.KIND == "fixed" else tl.float32)
        stop = tl.minimum(start + promotion, k)
        for first in range(start, stop, group):
            end = tl.minimum(first + group, stop)
            if C.KIND == "hopper":
                places = x_rows, other_columns, in_rows, in_columns, x.column, other.row
                exact = _sum_of_cut(register, places, first, end, C)
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
def _sum_of_cut(register, places, first, end, C: tl.constexpr):
    """Align the register, (ROWS, COLUMNS) float32, and the products of a group, cut them, and add them: in float64."""
    if C.SHORT:
        exponents, near = _largest_exponents(register, places, first, end)
        if near:
            unit = tl.maximum(exponents, -_NEAR_SUM) - C.FRACTION
            result = _sum_in_float32(register, places, first, end, unit, C).to(tl.float64)
        else:
            result = _sum_in_float64(register.to(tl.float64), places, first, end, C)
    else:
        result = _sum_in_float64(register.to(tl.float64), places, first, end, C)
    return result


@triton.jit
def _sum_in_float64(register, places, first, end, C: tl.constexpr):
    largest = _exponent(register)
    for i in range(first, end):
        a, b = _factors(places, i)
        largest = tl.maximum(largest, _exponent(a.to(tl.float64))[:, None] + _exponent(b.to(tl.float64))[None, :])
    largest = tl.minimum(tl.maximum(largest, -_FAR), _FAR) - C.FRACTION
    unit, units = _power_of_two(largest), _power_of_two(-largest)
    register = libdevice.trunc(register * units)
    for i in range(first, end):
        a, b = _factors(places, i)
        register += libdevice.trunc(a.to(tl.float64)[:, None] * b.to(tl.float64)[None, :] * units)
    return register * unit


@triton.jit
def _sum_in_float32(register, places, first, end, unit, C: tl.constexpr):
    """`unit`: the exponents of the units at which values are cut, (ROWS, COLUMNS) int32."""
    x_rows, other_columns, in_rows, in_columns, x_stride, other_stride = places
    base = (unit + _MANTISSA_32 + _BIAS_32) << _MANTISSA_32
    large = (base ^ _sign(register)).to(tl.float32, bitcast=True)
    total = libdevice.add_rz(register, large) - large
    rounds: tl.constexpr = C.UNROLL
    for start in range(first, end, rounds):
        for j in tl.static_range(rounds):
            i = start + j
            at = i.to(tl.int64)
            a = tl.load(x_rows + at * x_stride, mask=in_rows & (i < end), other=0.0).to(tl.float32)
            b = tl.load(other_columns + at * other_stride, mask=in_columns & (i < end), other=0.0).to(tl.float32)
            signs = tl.broadcast(_sign(a)[:, None], _sign(b)[None, :])
            large = _xor(base, signs[0], signs[1]).to(tl.float32, bitcast=True)
            factors = tl.broadcast(a[:, None], b[None, :])
            total += libdevice.fma_rz(factors[0], factors[1], large) - large
    return total


@triton.jit
def _xor(x, y, z):
    """Return x ^ y ^ z by one instruction, which LLVM makes two of."""
    return tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, $3, 0x96;", "=r,r,r,r", [x, y, z], tl.int32, True, 1)


@triton.jit
def _largest_exponents(register, places, first, end):
    """Return the largest exponent of the register and the products of a group, (ROWS, COLUMNS) int32, and whether that
    is right and float32 can cut these products.

    Tensor cores add 64 ** (exponent of the product - those of the largest factors): the first digit of the sum to the
    base 64 is at the place of the largest.
    """
    x_rows, other_columns, in_rows, in_columns, x_stride, other_stride = places
    indices = (first + tl.arange(0, GROUP)).to(tl.int64)
    some = indices < end
    mask = in_rows[:, None] & some[None, :]
    a = _exponent_32(tl.load(x_rows[:, None] + indices[None, :] * x_stride, mask=mask, other=0.0).to(tl.float32))
    mask = some[:, None] & in_columns[None, :]
    b = _exponent_32(
        tl.load(other_columns[None, :] + indices[:, None] * other_stride, mask=mask, other=0.0).to(tl.float32)
    )
    a_most, b_most = tl.max(a, 1), tl.max(b, 0)
    sums = tl.dot(_power_of_64(a - a_most[:, None]), _power_of_64(b - b_most[None, :]))
    digits = ((sums.to(tl.int32, bitcast=True) >> _MANTISSA_32) & _EXPONENT_32) - _BIAS_32
    products = (digits + _DIGIT * GROUP) // _DIGIT - GROUP + a_most[:, None] + b_most[None, :]
    sum_exponent = _exponent_32(register)
    far = (digits == -_BIAS_32) | (tl.maximum(products, sum_exponent) > _NEAR_SUM)
    far |= (sum_exponent < -_NEAR_SUM) & (register != 0)
    far |= _any_far(a, 1)[:, None] | _any_far(b, 0)[None, :]
    return tl.maximum(products, sum_exponent), tl.max(far.to(tl.int32)) == 0


@triton.jit
def _any_far(exponents, axis: tl.constexpr):
    return tl.max(tl.where(exponents == _OF_ZERO, 0, tl.abs(exponents)), axis) > _NEAR


@triton.jit
def _power_of_64(exponents):
    """Return 64 ** exponents in bfloat16, zero below its range."""
    bits = tl.maximum(exponents * _DIGIT + _BIAS_32, 0) << _MANTISSA_32
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _factors(places, i):
    """Return the i-th column of x, (ROWS,), and row of other, (COLUMNS,)."""
    x_rows, other_columns, in_rows, in_columns, x_stride, other_stride = places
    i = i.to(tl.int64)
    return (
        tl.load(x_rows + i * x_stride, mask=in_rows, other=0.0),
        tl.load(other_columns + i * other_stride, mask=in_columns, other=0.0),
    )


@triton.jit
def _sign(x):
    return x.to(tl.int32, bitcast=True) & _SIGN_32


@triton.jit
def _exponent_32(x):
    """Return the exponents of float32 values, that of a subnormal value below the normal ones."""
    exponents = ((x.to(tl.int32, bitcast=True) >> _MANTISSA_32) & _EXPONENT_32) - _BIAS_32
    return tl.where(x == 0, _OF_ZERO, exponents)


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
