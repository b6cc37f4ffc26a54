"""Products of more rows of x than `gpu_linear_kernel` is for, with weights in the order of fragments, on sm_90.

x is first copied into the order of the threads. Where a program for each tile of the output would leave
multiprocessors idle, several share the sums along K, each with its part, and a last kernel adds the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.gemm_kernel import STAGE_K, Wide, add_parts_kernel, order_kernel, wide_kernel
from pt2mx.kernels.gpu.gemv_kernel import form_of
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS

_SHARED_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
_SHARED_BYTES = 3 * 2**16  # of a multiprocessor's shared memory, for stages
_MOST_SPLITS = 8  # more cost what they win


class Tile(NamedTuple):
    """What a program multiplies: rows of x, with the 16 rows of the weight of each warp; and along K a split's part."""

    batch: int
    warps: int
    splits: int


def wide(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, element: ElementFormat) -> None:
    """Arguments as of `gpu_linear.linear`; the product goes to out: (batch, n)."""
    (batch, n), (tiles, steps) = out.shape, data.shape[:2]
    tile = tile_of(batch, tiles, torch.cuda.get_device_properties(x.device).multi_processor_count, element.bits)
    split = triton.cdiv(triton.cdiv(steps, 2), tile.splits) * 2
    splits = triton.cdiv(steps, split)
    parts = out if splits == 1 else torch.empty(splits, batch, n, dtype=torch.float32, device=x.device)
    form = form_of(element, along_n=tile.warps, has_bias=bias is not None and splits == 1, overlaps=True)
    stages = min(8, _SHARED_BYTES // (tile.batch * STAGE_K.value * x.element_size()))
    grid = (triton.cdiv(tiles, tile.warps), triton.cdiv(batch, tile.batch), splits)
    with torch.cuda.device_of(x):
        ordered = _ordered(x, grid[1] * tile.batch, element)
        descriptor = TensorDescriptor.from_tensor(ordered, [tile.batch, STAGE_K.value], _SHARED_LAYOUT)
        of_launch = (batch, n, tiles, steps, split, form, Wide(tile.batch, stages))
        wide_kernel[grid](descriptor, data, scale, bias, parts, *of_launch, num_warps=tile.warps, launch_pdl=True)
        if splits > 1:
            size = batch * n
            form = form_of(element, has_bias=bias is not None, overlaps=True)
            add_parts_kernel[(triton.cdiv(size, 2048),)](
                parts, bias, out, n, size, splits, form, num_warps=8, launch_pdl=True
            )


def tile_of(batch: int, tiles: int, multiprocessors: int, bits: int) -> Tile:
    """What was fastest on an H200 for most sizes: the largest that leave few multiprocessors idle; with 256 rows of x
    only elements of 8 bits gain by 8 warps."""

    def programs(rows: int, warps: int) -> int:
        return triton.cdiv(tiles, warps) * triton.cdiv(batch, rows)

    enough = 0.9 * multiprocessors
    rows = min(max(triton.next_power_of_2(batch), 16), 256)
    if rows == 256 and programs(rows, 4) < enough:
        rows = 128
    warps = 8 if (rows < 256 or bits == 8) and programs(rows, 8) >= enough else 4
    wanted = multiprocessors * (2 if rows <= 32 else 1)
    return Tile(rows, warps, min(max(1, wanted // programs(rows, warps)), _MOST_SPLITS))


def _ordered(x: Tensor, rows: int, element: ElementFormat) -> Tensor:
    """(batch, K) -> (rows, K'), K' in whole steps: of each step the pairs of values, one of each thread in turn.

    What is in rows from `batch` on is not used; they are there because copies of parts beyond a tensor are slow."""
    (batch, k), step = x.shape, FRAGMENTS[element.name].step
    out = torch.empty(rows, triton.cdiv(k, step) * step, dtype=x.dtype, device=x.device)
    words, words_out = k // 2, out.shape[1] // 2
    grid = (triton.cdiv(words_out, 1024), batch)
    form = form_of(element, overlaps=True)
    order_kernel[grid](x.view(torch.int32), out.view(torch.int32), words, words_out, form, num_warps=8, launch_pdl=True)
    return out
