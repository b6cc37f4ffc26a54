"""The Triton kernels of bfloat16 matmuls with a result in float32: of matrices, and of rows with experts' weights.

Tensor cores truncate their sums after each step, so that a long sum is less exact than a float32 sum. Here they sum
only BLOCK_K = 64 products at a time, and the kernel adds these sums in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Sizes(NamedTuple):
    """The compile-time values of a program."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    EVEN_K: bool  # BLOCK_K divides k
    BIAS: bool = False
    EXPERTS: int = 0  # a power of two not below the experts


@triton.jit
def bf16_gemm_kernel(x, y, bias, out, sizes, x_strides, y_strides, S: tl.constexpr):
    """x: (first, second, m, k), y: (first, second, k, n) bfloat16 by the strides (1 for x's last dimension), bias: (n,)
    -> out: (first, second, m, n) fp32."""
    m, n, k, second = sizes
    x_first, x_second, x_row = x_strides
    y_first, y_second, y_row, y_column = y_strides
    tiles_m, tiles_n = tl.cdiv(m, S.BLOCK_M), tl.cdiv(n, S.BLOCK_N)
    matrix, tile = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64), tl.program_id(0) % (tiles_m * tiles_n)
    pid_m, pid_n = tile_of(tile, tiles_m, tiles_n)
    offs_m = pid_m * S.BLOCK_M + tl.arange(0, S.BLOCK_M)
    offs_n = pid_n * S.BLOCK_N + tl.arange(0, S.BLOCK_N)
    offs_k = tl.arange(0, S.BLOCK_K)
    x_ptrs = x + matrix // second * x_first + matrix % second * x_second
    y_ptrs = y + matrix // second * y_first + matrix % second * y_second
    x_ptrs += (offs_m % m).to(tl.int64)[:, None] * x_row + offs_k[None, :]
    y_ptrs += offs_k.to(tl.int64)[:, None] * y_row + (offs_n % n).to(tl.int64)[None, :] * y_column
    acc = matmul_tile(x_ptrs, y_ptrs, y_row, k, S)
    if S.BIAS:
        acc += tl.load(bias + offs_n, mask=offs_n < n, other=0.0)[None, :]
    out_ptrs = out + (matrix * m + offs_m[:, None]) * n + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=(offs_m < m)[:, None] & (offs_n < n)[None, :])


@triton.jit
def tile_of(tile, tiles_m, tiles_n):
    """Return the row and the column of a tile. Eight rows of tiles are computed one column after the other, so that
    their operands stay in the L2 cache."""
    group = 8 * tiles_n
    first_m = tile // group * 8
    group_m = tl.minimum(tiles_m - first_m, 8)
    return first_m + tile % group % group_m, tile % group // group_m


@triton.jit
def matmul_tile(x_ptrs, y_ptrs, y_row, k, S: tl.constexpr):
    """x_ptrs: (BLOCK_M, BLOCK_K), y_ptrs: (BLOCK_K, BLOCK_N), to the first of k values -> (BLOCK_M, BLOCK_N) fp32."""
    offs_k = tl.arange(0, S.BLOCK_K)
    acc = tl.full([S.BLOCK_M, S.BLOCK_N], 0.0, tl.float32)
    for start_k in tl.range(0, k, S.BLOCK_K):
        if S.EVEN_K:
            a, b = tl.load(x_ptrs), tl.load(y_ptrs)
        else:
            a = tl.load(x_ptrs, mask=(start_k + offs_k < k)[None, :], other=0.0)
            b = tl.load(y_ptrs, mask=(start_k + offs_k < k)[:, None], other=0.0)
        acc = tl.fma(tl.dot(a, b), 1.0, acc)  # with a plain sum the compiler would let the tensor cores accumulate
        x_ptrs += S.BLOCK_K
        y_ptrs += S.BLOCK_K * y_row
    return acc


@triton.jit
def grouped_gemm_kernel(x, weight, offs, out, sizes, S: tl.constexpr):
    """x: (rows, k) bfloat16 by the stride of its rows, weight: (experts, n, k) bfloat16, offs: (experts,) int32 -> out:
    (rows, n) fp32. tiles_m: the largest possible number of row tiles."""
    rows, experts, n, k, tiles_m, x_row = sizes
    expert = tl.arange(0, S.EXPERTS)
    end = tl.minimum(tl.load(offs + expert, mask=expert < experts, other=0), rows)
    start = tl.load(offs + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = tl.cdiv(tl.maximum(end - start, 0), S.BLOCK_M)
    first_tile = tl.cumsum(tiles) - tiles
    pid_m, pid_n = tile_of(tl.program_id(0), tiles_m, tl.cdiv(n, S.BLOCK_N))
    is_own = (first_tile <= pid_m) & (pid_m < first_tile + tiles)
    last = tl.sum(tl.where(is_own, end, 0))
    first = tl.sum(tl.where(is_own, start + (pid_m - first_tile) * S.BLOCK_M, 0))
    if first < last:
        offs_m = first + tl.arange(0, S.BLOCK_M)
        offs_n = pid_n * S.BLOCK_N + tl.arange(0, S.BLOCK_N)
        offs_k = tl.arange(0, S.BLOCK_K)
        expert_ptr = weight + tl.sum(tl.where(is_own, expert, 0)).to(tl.int64) * n * k
        x_ptrs = x + tl.minimum(offs_m, last - 1).to(tl.int64)[:, None] * x_row + offs_k[None, :]
        weight_ptrs = expert_ptr + (offs_n % n).to(tl.int64)[None, :] * k + offs_k[:, None]
        acc = matmul_tile(x_ptrs, weight_ptrs, 1, k, S)
        out_ptrs = out + offs_m.to(tl.int64)[:, None] * n + offs_n[None, :]
        tl.store(out_ptrs, acc, mask=(offs_m < last)[:, None] & (offs_n < n)[None, :])
