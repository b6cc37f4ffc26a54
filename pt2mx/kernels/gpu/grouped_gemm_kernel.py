"""The Triton kernel of products of rows that are sorted by expert, each with the weight of its expert, in bfloat16 with
a result in float32, summed as in `bfloat16_gemm_kernel`.

How many rows an expert has only the GPU knows: there are programs for as many tiles as there could be, each finds its
own, and those that are left over end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pt2mx.kernels.gpu.bfloat16_gemm_kernel import sum_of_products


@triton.jit
def grouped_gemm_kernel(
    x, weight, offs, out, rows, experts, n, k, down, x_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """x: (rows, k) bfloat16 by its stride, weight: (experts, n, k) bfloat16, offs: (experts,) int32 -> out: (rows, n)
    fp32. down: tiles of rows that there could be; EXPERTS: a power of two not below experts; WHOLE: DEPTH divides k."""
    expert = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(offs + expert, mask=expert < experts, other=0), rows)
    start = tl.load(offs + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = tl.cdiv(tl.maximum(end - start, 0), ROWS)
    before = tl.cumsum(tiles) - tiles
    together = 8 * tl.cdiv(n, COLUMNS)  # tiles whose operands the second-level cache holds
    top = tl.program_id(0) // together * 8
    high = tl.minimum(down - top, 8)
    at = top + tl.program_id(0) % together % high
    own = (before <= at) & (at < before + tiles)
    last = tl.sum(tl.where(own, end, 0))
    first = tl.sum(tl.where(own, start + (at - before) * ROWS, 0))
    if first < last:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(0) % together // high * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        of_expert = weight + tl.sum(tl.where(own, expert, 0)).to(tl.int64) * n * k
        of_x = x + tl.minimum(row, last - 1).to(tl.int64)[:, None] * x_row + depth[None, :]
        of_weight = of_expert + (column % n).to(tl.int64)[None, :] * k + depth[:, None]
        total = sum_of_products(of_x, of_weight, 1, k, DEPTH, WHOLE)
        to = out + row.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(to, total, mask=(row < last)[:, None] & (column < n)[None, :])
