"""Triton functions of accumulators that align products before they add them (`hopper`).

`pt2mx.kernels.accumulated_matmul` is the definition: products of a group are cut toward zero at a unit, which the
largest exponent of the group and the register decides. There are three ways to cut:

- *By chains*, for factors of x of at most 12 bits, and of other of at most 11: one fused multiply-add per product,
  rounded toward zero, whose sum is between 2**23 and 2**24 units. Such a sum is cut downward, whatever the sign of a
  product. For a negative product this is a unit too low, or nothing where the product is a whole number of units. So
  each product is made a little larger, by less than the distance between two products of so many bits: then all
  negative ones are a unit too low. Tensor cores count these by the signs of their factors.
- *In float32*, for factors of more bits: one such multiply-add per product, with 2**23 units of the product's sign,
  which are taken off again.
- *In float64*, for factors with exponents outside of _LEAST to _MOST, registers outside of _LEAST_SUM to _MOST_SUM, and
  groups in which the largest product is 23 binades or more below that of the largest factors.

`look_at_factors` prepares the first way: it looks at each matrix once, not once for each tile of the other. What
`chained_matmul_kernel` cannot compute by chains alone, `accumulated_matmul_kernel` does the other ways, so that the
registers that these need do not slow down the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

#: of float64
_BIAS: tl.constexpr = tl.constexpr(1023)
_MANTISSA: tl.constexpr = tl.constexpr(52)
_EXPONENT: tl.constexpr = tl.constexpr(0x7FF)
#: as in the definition
_FAR: tl.constexpr = tl.constexpr(400)
#: of float32
_BIAS_32: tl.constexpr = tl.constexpr(127)
_MANTISSA_32: tl.constexpr = tl.constexpr(23)
_EXPONENT_32: tl.constexpr = tl.constexpr(0xFF << 23)
_SIGN_32: tl.constexpr = tl.constexpr(-(2**31))
_MAGNITUDE_32: tl.constexpr = tl.constexpr(2**31 - 1)
#: what float32 cuts: at most as many products, of factors of these exponents, and sums of these
GROUP: tl.constexpr = tl.constexpr(32)
_LEAST: tl.constexpr = tl.constexpr(-40)
_MOST: tl.constexpr = tl.constexpr(30)
_LEAST_SUM: tl.constexpr = tl.constexpr(-80)
_MOST_SUM: tl.constexpr = tl.constexpr(100)
#: the last bits of float32, which are zero in a factor of x of at most 12 bits, and in one of other of 11
_BELOW_12: tl.constexpr = tl.constexpr(2**12 - 1)
_BELOW_11: tl.constexpr = tl.constexpr(2**13 - 1)
#: 256 ** (exponent - the largest) stands for a factor of x and of other. The exponents, in float32, of the powers of
#: the largest; the digit of a sum of products, to the base 256, for the product of the largest; the least digit that no
#: power below the range of float32 can reach
_POWER_OF_X: tl.constexpr = tl.constexpr(184)
_POWER_OF_OTHER: tl.constexpr = tl.constexpr(183)
_DIGIT: tl.constexpr = tl.constexpr(30)
_LEAST_DIGIT: tl.constexpr = tl.constexpr(8)
#: the ways to cut the products of a group
_BY_CHAINS: tl.constexpr = tl.constexpr(0)
_IN_FLOAT32: tl.constexpr = tl.constexpr(1)
_IN_FLOAT64: tl.constexpr = tl.constexpr(2)


class Factors(NamedTuple):
    """What is known of a matrix (k, size): pointers to tensors of whole groups and tiles of zeros behind its end."""

    operands: Any  # (batch, groups, tiles, 32, TILE) float32; those of x enlarged, and +-2**-126 for zeros
    powers: Any  # (batch, groups, tiles, 32, TILE) bfloat16: 256 ** (exponent - the largest of the group), scaled
    signs: Any  # (batch, groups, tiles, 32, TILE) bfloat16
    largest: Any  # (batch, groups, tiles, TILE) int32: the largest exponent, as float32 has it
    ways: Any  # (batch, groups, tiles) int32


class Places(NamedTuple):
    """Where a program reads: pointers, to its rows or columns, which of these there are, and the strides along k."""

    x: Any
    other: Any
    in_rows: Any
    in_columns: Any
    x_stride: Any
    other_stride: Any


@triton.jit
def look_at_factors(matrix, strides, factors, sizes, OF_X: tl.constexpr, TILE: tl.constexpr):
    """matrix: (batch, k, size) float32 -> factors. `sizes`: k, size, and the products of a group, at most 32.

    A factor of x becomes the next larger float32: its products grow by less than the distance between two products, if
    both factors have at most 24 bits together.
    """
    k, size, group = sizes
    batch_stride, k_stride, stride = strides
    tile, index, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles, groups = tl.num_programs(0), tl.num_programs(1)
    columns, rows = tile * TILE + tl.arange(0, TILE), index * group + tl.arange(0, GROUP)
    within = (rows < tl.minimum((index + 1) * group, k))[:, None] & (columns < size)[None, :]
    at = matrix + batch * batch_stride + rows.to(tl.int64)[:, None] * k_stride
    bits = _bits(tl.load(at + columns.to(tl.int64)[None, :] * stride, mask=within, other=0.0))
    exponents, zero = (bits & _EXPONENT_32) >> _MANTISSA_32, (bits & _MAGNITUDE_32) == 0
    largest = tl.max(exponents, 0)
    top: tl.constexpr = _POWER_OF_X if OF_X else _POWER_OF_OTHER
    powers = _float(tl.maximum((exponents - largest[None, :]) * 8 + top, 0) << _MANTISSA_32)
    signs = _float((bits & _SIGN_32) | (_BIAS_32 << _MANTISSA_32))
    operands = _float(tl.where(zero, (bits & _SIGN_32) | (1 << _MANTISSA_32), bits + 1 if OF_X else bits))
    below: tl.constexpr = _BELOW_12 if OF_X else _BELOW_11
    way = tl.where((bits & below) != 0, _IN_FLOAT32, _BY_CHAINS)
    near = (exponents >= _LEAST + _BIAS_32) & (exponents <= _MOST + _BIAS_32)
    way = tl.where(near | zero, way, _IN_FLOAT64)
    block = (batch * groups + index) * tiles + tile
    inside = tl.arange(0, TILE)
    out = (block * GROUP + tl.arange(0, GROUP))[:, None] * TILE + inside[None, :]
    tl.store(factors.operands + out, operands)
    tl.store(factors.powers + out, powers.to(tl.bfloat16))
    tl.store(factors.signs + out, signs.to(tl.bfloat16))
    tl.store(factors.largest + block * TILE + inside, largest)
    tl.store(factors.ways + block, tl.max(way))


@triton.jit
def chained_matmul_kernel(out, left, of_x, of_other, sizes, C: tl.constexpr):
    """The factors of x: (batch, m, k) and other: (batch, k, n) -> out: (batch, m, n) float32, by chains.

    `left`: (batch, tiles of m, tiles of n) int32, is not zero where chains do not compute a tile. `sizes`: as in
    `accumulated_matmul_kernel`.
    """
    m, n, k, group, promotion = sizes
    row, column, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    total = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float32)
    worst = _BY_CHAINS
    index = batch * tl.cdiv(k, group)
    for start in range(0, k, promotion):
        register = tl.full([C.ROWS, C.COLUMNS], 0.0, tl.float32)
        for _ in range(start, tl.minimum(start + promotion, k), group):
            blocks = index * tl.num_programs(0) + row, index * tl.num_programs(1) + column
            large, way = _units(register, blocks, of_x, of_other, C)
            worst = tl.maximum(worst, way)
            if worst == _BY_CHAINS:
                register = _cut_sum(_sum_by_chains(register, blocks, large, of_x, of_other, C), C)
            index += 1
        total += register
    tl.store(left + (batch * tl.num_programs(0) + row) * tl.num_programs(1) + column, worst)
    rows, columns = row * C.ROWS + tl.arange(0, C.ROWS), column * C.COLUMNS + tl.arange(0, C.COLUMNS)
    at = out + (batch * m + rows)[:, None] * n + columns[None, :]
    tl.store(at, total, mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def aligned(register, places, first, end, index, of_x, of_other, C: tl.constexpr):
    """Align the register, (ROWS, COLUMNS) float32, and the products of a group, cut them, add them, and cut the sum.

    `index`: the place of the group among those of all batches, where `of_x` and `of_other` hold its factors.
    """
    if C.SHORT:
        blocks = index * tl.num_programs(0) + tl.program_id(0), index * tl.num_programs(1) + tl.program_id(1)
        large, way = _units(register, blocks, of_x, of_other, C)
        magnitude = _bits(register) & _MAGNITUDE_32
        far = (magnitude >= _power_bits(_MOST_SUM)) | ((magnitude < _power_bits(_LEAST_SUM)) & (magnitude != 0))
        if tl.maximum(way, tl.max(tl.where(far, _IN_FLOAT64, _BY_CHAINS))) == _IN_FLOAT64:
            result = _in_float64(register, places, first, end, C)
        else:
            result = _cut_sum(_sum_in_float32(register, places, first, end, large), C)
    else:
        result = _in_float64(register, places, first, end, C)
    return result


@triton.jit
def _units(register, blocks, of_x, of_other, C: tl.constexpr):
    """Return the bits of 2**23 units for the register and a group, (ROWS, COLUMNS) int32, and how to cut the products.

    Tensor cores add the products' powers of 256: the first digit of the sum is at the place of the largest product. A
    register has an exponent from _LEAST_SUM to _MOST_SUM, or is a multiple of the least unit, as where chains alone
    computed it.
    """
    a_most = tl.load(of_x.largest + blocks[0] * C.ROWS + tl.arange(0, C.ROWS))
    b_most = tl.load(of_other.largest + blocks[1] * C.COLUMNS + tl.arange(0, C.COLUMNS))
    sums = _bits(_dot(of_x.powers, of_other.powers, blocks, C))
    bases = (a_most << _MANTISSA_32)[:, None] + ((b_most - (_DIGIT + _BIAS_32)) << _MANTISSA_32)[None, :]
    products = (sums >> (_MANTISSA_32 + 3) << _MANTISSA_32) + bases
    largest = tl.maximum(tl.maximum(products, _bits(register) & _MAGNITUDE_32), _power_bits(_LEAST_SUM))
    lost = tl.min(sums) < (_LEAST_DIGIT * 8 << _MANTISSA_32)
    ways = tl.maximum(tl.load(of_x.ways + blocks[0]), tl.load(of_other.ways + blocks[1]))
    large = (largest & _EXPONENT_32) + ((_MANTISSA_32 - C.FRACTION) << _MANTISSA_32)
    return large, tl.where(lost, _IN_FLOAT64, ways)


@triton.jit
def _dot(x, other, blocks, C: tl.constexpr):
    """Return the product of the group's powers or signs, (ROWS, COLUMNS) float32."""
    inside = tl.arange(0, GROUP)
    a = x + blocks[0] * GROUP * C.ROWS + tl.arange(0, C.ROWS)[:, None] + inside[None, :] * C.ROWS
    b = other + blocks[1] * GROUP * C.COLUMNS + inside[:, None] * C.COLUMNS + tl.arange(0, C.COLUMNS)[None, :]
    return tl.dot(tl.load(a), tl.load(b))


@triton.jit
def _sum_by_chains(register, blocks, large, of_x, of_other, C: tl.constexpr):
    """`large`: the bits of 2**23 units, (ROWS, COLUMNS) int32.

    The chain begins at 1.5 * 2**23 units, with the register and a unit for each negative product: the sum of the signs
    of 32 products tells that (32 - sum) / 2 of them are negative.
    """
    signs = _dot(of_x.signs, of_other.signs, blocks, C)
    half: tl.constexpr = 1 << _MANTISSA_32 - 1
    half_unit = _float(large - ((_MANTISSA_32 + 1) << _MANTISSA_32))
    chain = libdevice.fma_rn(-signs, half_unit, _float(large + (half + GROUP // 2))) + _cut(register, large)
    a_at = of_x.operands + blocks[0] * GROUP * C.ROWS + tl.arange(0, C.ROWS)
    b_at = of_other.operands + blocks[1] * GROUP * C.COLUMNS + tl.arange(0, C.COLUMNS)
    rounds: tl.constexpr = C.UNROLL
    for start in range(0, GROUP, rounds):
        for j in tl.static_range(rounds):
            a, b = tl.load(a_at + (start + j) * C.ROWS), tl.load(b_at + (start + j) * C.COLUMNS)
            factors = tl.broadcast(a[:, None], b[None, :])
            chain = libdevice.fma_rz(factors[0], factors[1], chain)
    return chain - _float(large + half)


@triton.jit
def _sum_in_float32(register, places, first, end, large):
    total = _cut(register, large)
    for i in range(first, end):
        a, b = _factors(places, i)
        signs = tl.broadcast(_bits(a)[:, None] & _SIGN_32, _bits(b)[None, :] & _SIGN_32)
        signed = _float(large ^ signs[0] ^ signs[1])
        factors = tl.broadcast(a[:, None], b[None, :])
        total += libdevice.fma_rz(factors[0], factors[1], signed) - signed
    return total


@triton.jit
def _cut(register, large):
    signed = _float(large ^ (_bits(register) & _SIGN_32))
    return libdevice.add_rz(register, signed) - signed


@triton.jit
def _cut_sum(y, C: tl.constexpr):
    """Keep the fraction bits of float32 sums."""
    tail: tl.constexpr = _MANTISSA_32 - C.FRACTION
    return _float(_bits(y) >> tail << tail)


@triton.jit
def _in_float64(register, places, first, end, C: tl.constexpr):
    largest, register = _exponent(register.to(tl.float64)), register.to(tl.float64)
    for i in range(first, end):
        a, b = _factors(places, i)
        largest = tl.maximum(largest, _exponent(a.to(tl.float64))[:, None] + _exponent(b.to(tl.float64))[None, :])
    largest = tl.minimum(tl.maximum(largest, -_FAR), _FAR) - C.FRACTION
    unit, units = _power_of_two(largest), _power_of_two(-largest)
    register = libdevice.trunc(register * units)
    for i in range(first, end):
        a, b = _factors(places, i)
        register += libdevice.trunc(a.to(tl.float64)[:, None] * b.to(tl.float64)[None, :] * units)
    exact = register * unit
    tail: tl.constexpr = _MANTISSA - C.FRACTION
    cut = (exact.to(tl.int64, bitcast=True) >> tail << tail).to(tl.float64, bitcast=True)
    return tl.where(tl.abs(exact) < float("inf"), cut, exact).to(tl.float32)


@triton.jit
def _factors(places, i):
    """Return the i-th column of x, (ROWS,), and row of other, (COLUMNS,)."""
    i = i.to(tl.int64)
    return (
        tl.load(places.x + i * places.x_stride, mask=places.in_rows, other=0.0),
        tl.load(places.other + i * places.other_stride, mask=places.in_columns, other=0.0),
    )


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _power_bits(exponent: tl.constexpr):
    return (exponent + _BIAS_32) << _MANTISSA_32


@triton.jit
def _exponent(x):
    return ((x.to(tl.int64, bitcast=True) >> _MANTISSA) & _EXPONENT).to(tl.int32) - _BIAS


@triton.jit
def _power_of_two(exponent):
    return ((exponent + _BIAS).to(tl.int64) << _MANTISSA).to(tl.float64, bitcast=True)
