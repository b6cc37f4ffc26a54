"""The Triton kernel of products of bfloat16 with a result in float32.

Tensor cores cut off what their sums have below the last place, in each step: after many steps a sum is less exact than
one of float32 products. Here they sum 64 products at a time, and these sums are added in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bfloat16_gemm_kernel(
    x, y, bias, out, m, n, k, second,
    x_first, x_second, x_row, y_first, y_second, y_row, y_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """x: (first, second, m, k), y: (first, second, k, n) bfloat16 by the strides, that of x's last dimension 1, bias:
    (n,) -> out: (first, second, m, n) fp32. WHOLE: DEPTH divides k."""
    down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    matrix, tile = (tl.program_id(0) // (down * across)).to(tl.int64), tl.program_id(0) % (down * across)
    together = 8 * across  # tiles whose operands the second-level cache holds
    top = tile // together * 8
    high = tl.minimum(down - top, 8)
    row = (top + tile % together % high) * ROWS + tl.arange(0, ROWS)
    column = tile % together // high * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    of_x = x + matrix // second * x_first + matrix % second * x_second
    of_y = y + matrix // second * y_first + matrix % second * y_second
    of_x += (row % m).to(tl.int64)[:, None] * x_row + depth[None, :]
    of_y += depth.to(tl.int64)[:, None] * y_row + (column % n).to(tl.int64)[None, :] * y_column
    total = sum_of_products(of_x, of_y, y_row, k, DEPTH, WHOLE)
    if BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0)[None, :]
    to = out + (matrix * m + row[:, None]) * n + column[None, :]
    tl.store(to, total, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def sum_of_products(of_x, of_y, y_row, k, DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    """of_x: (rows, DEPTH), of_y: (DEPTH, columns), where the first of k values are -> (rows, columns) fp32."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([of_x.shape[0], of_y.shape[1]], tl.float32)
    for first in tl.range(0, k, DEPTH):
        if WHOLE:
            a, b = tl.load(of_x), tl.load(of_y)
        else:
            a = tl.load(of_x, mask=(first + depth < k)[None, :], other=0.0)
            b = tl.load(of_y, mask=(first + depth < k)[:, None], other=0.0)
        total = tl.fma(tl.dot(a, b), 1.0, total)  # what is added to a product the tensor cores would add
        of_x += DEPTH
        of_y += DEPTH * y_row
    return total
