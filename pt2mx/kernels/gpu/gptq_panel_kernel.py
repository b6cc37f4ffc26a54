"""The kernel of `gptq_panel`, equal to the CPU's to the bit.

A program keeps all columns of a few values of a group in registers. A column that is rounded subtracts its error from
all later ones at once, by a fused multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pt2mx.kernels.gpu.blocks import round_magnitude, with_sign


@triton.jit
def gptq_panel_kernel(
    columns,
    factor,
    scale,
    low,
    high,
    rounded,
    errors,
    width,
    n,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    C: tl.constexpr,
):
    """columns, scale, low, high, rounded, errors: (groups, width, n); factor: (groups, width, width). WIDTH: a power of
    two, at least width."""
    group = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    column = tl.arange(0, WIDTH)[:, None]
    first, exists = group * width * n, at < n
    tile = tl.load(columns + first + column * n + at[None, :], mask=(column < width) & exists[None, :], other=0.0)
    shares = factor + group * width * width
    for i in range(width):
        # as integers, whose sum keeps the sign of a zero
        bits = tl.where(column == i, tile.to(tl.int32, bitcast=True), 0)
        w = tl.sum(bits, 0).to(tl.float32, bitcast=True)
        place = first + i * n + at
        inside = w
        if low is not None:
            smallest = tl.load(low + place, mask=exists, other=0.0)
            largest = tl.load(high + place, mask=exists, other=0.0)
            inside = tl.where(inside < smallest, smallest, inside)
            inside = tl.where(inside > largest, largest, inside)
        multiplier = tl.load(scale + place, mask=exists, other=1.0)
        units = inside * tl.div_rn(1.0, multiplier)
        value = with_sign(round_magnitude(units, None, tl.constexpr(C.nearest), C), units, C)
        value = tl.where(units - units == 0.0, value, float("nan")) * multiplier
        error = tl.div_rn(w - value, tl.load(shares + i * width + i))
        tl.store(rounded + place, value, mask=exists)
        tl.store(errors + place, error, mask=exists)
        later = (column > i) & (column < width)
        share = tl.load(shares + i * width + column, mask=later, other=0.0)
        tile = tl.where(later, tl.fma(-share, error[None, :], tile), tile)
