"""Products with weights in the order of fragments (`gpu_fragments`), on an NVIDIA GPU.

Up to `_LARGEST_WIDE_BATCH` rows of x kernels read the packed weight: with a few rows `linear_kernel`, whose time is
that of reading it, with more `gpu_wide`. Beyond, and on other GPUs than sm_90 from 33 rows on, it is dequantized for
torch's product. None waits for the device; all can be captured in a CUDA graph, and give the same bits in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.gemm import wide
from pt2mx.kernels.gpu.gemv_kernel import dequantize_kernel, form_of, linear_kernel
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, ROWS

#: bits of an element -> the most rows of x that `gpu_wide` multiplies, as was fastest on an H200
_LARGEST_WIDE_BATCH = {4: 1536, 6: 1536, 8: 512}
#: tiles of the weight that are dequantized for one product: on an H200 one was faster than several of 4096 rows in
#: nearly all sizes, and than several of 8192 in most
_LARGEST_PART = 1024


class Shape(NamedTuple):
    """How a program works: tiles of 16 rows a warp, steps that are loaded together, and warps that share a tile along
    K, as many that a multiprocessor has `warps`."""

    tiles: int
    steps: int
    warps: int


#: (bits of an element, tiles of 8 rows of x, at most) -> what was fastest on an H200
_SHAPES = {
    (4, 1): Shape(1, 2, 12),
    (6, 1): Shape(1, 1, 12),
    (8, 1): Shape(1, 1, 12),
    (4, 2): Shape(2, 1, 6),
    (6, 2): Shape(2, 1, 6),
    (8, 2): Shape(2, 2, 6),
    (4, 4): Shape(2, 1, 6),
    (6, 4): Shape(2, 1, 6),
    (8, 4): Shape(2, 1, 6),
}
_SHAPE_OF_MANY_TILES = Shape(2, 1, 12)
#: bits of an element -> the most values of a row and warp of which up to 512 are loaded together, where 4 warps share a
#: tile of rows
_FEW_VALUES = {4: 512, 6: 1024, 8: 1024}


def linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, element: ElementFormat, n: int) -> Tensor:
    """x: (batch, K) bfloat16, contiguous, data and scale as of `to_fragments`, bias: (n,) or None -> (batch, n)."""
    out = x.new_empty(len(x), n)
    if x.data_ptr() % 16:  # as a part of a tensor may be: it is read 16 bytes at a time
        x = x.clone()
    is_sm_90 = torch.cuda.get_device_capability(x.device)[0] == 9
    if 0 < len(x) <= (_largest_small_batch(x, len(data), element) if is_sm_90 else 32):
        _small(x, data, scale, bias, out, element)
    elif is_sm_90 and 0 < len(x) <= _LARGEST_WIDE_BATCH[element.bits]:
        wide(x, data, scale, bias, out, element)
    else:
        for first in range(0, len(data), _LARGEST_PART):
            part = slice(first, first + _LARGEST_PART)
            rows = slice(ROWS * first, min(ROWS * part.stop, n))
            weight = dequantize(data[part], scale[part], element, rows.stop - rows.start, x.shape[1])
            if bias is None:
                torch.mm(x, weight.t(), out=out[:, rows])
            else:
                torch.addmm(bias[rows], x, weight.t(), out=out[:, rows])
    return out


def _largest_small_batch(x: Tensor, tiles: int, element: ElementFormat) -> int:
    """16 where rows are short, or the programs about as many as run at the same time."""
    programs = triton.cdiv(tiles, _SHAPES[element.bits, 2].tiles)
    at_once = torch.cuda.get_device_properties(x.device).multi_processor_count
    suits = x.shape[1] <= 2048 or 1.5 * at_once <= programs <= 3 * at_once
    return 16 if element.bits != 6 and suits else 8


def _small(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, element: ElementFormat) -> None:
    (batch, k), (tiles, steps) = x.shape, data.shape[:2]
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    columns = triton.next_power_of_2(triton.cdiv(batch, 8))
    shape, step = _SHAPES[element.bits, columns], FRAGMENTS[element.name].step
    if columns == 1 and tiles >= 12 * multiprocessors:
        shape = _SHAPE_OF_MANY_TILES
    programs = triton.cdiv(tiles, shape.tiles)
    along_k = 2
    while programs * along_k < shape.warps * multiprocessors and (along_k < 4 or 1024 * 2 * along_k <= k):
        along_k *= 2  # no further than to 1024 values of a row for a warp
    of_warp = max(1, triton.cdiv(steps, along_k))
    if shape.tiles == 1 and along_k == 4 and step * of_warp <= _FEW_VALUES[element.bits]:
        shape = shape._replace(steps=min(512 // step, triton.next_power_of_2(of_warp)))
    whole = k % (step * along_k * shape.steps) == 0
    # with more rows of x the programs of two kernels share out the multiprocessors badly
    overlaps = columns == 1 and torch.cuda.get_device_capability(x.device)[0] >= 9
    form = form_of(
        element,
        along_k=along_k,
        tiles=shape.tiles,
        columns=columns,
        steps=shape.steps,
        has_bias=bias is not None,
        whole=whole,
        overlaps=overlaps,
    )
    sizes = (batch, out.shape[1], k, tiles, steps)
    with torch.cuda.device_of(x):
        linear_kernel[(programs,)](x, data, scale, bias, out, *sizes, form, num_warps=along_k, launch_pdl=overlaps)


def dequantize(data: Tensor, scale: Tensor, element: ElementFormat, n: int, k: int) -> Tensor:
    """Fragments of whole tiles -> (n, k) bfloat16."""
    out = torch.empty(n, k, dtype=torch.bfloat16, device=data.device)
    tiles, steps = data.shape[:2]
    form = form_of(element, along_k=4)
    with torch.cuda.device_of(data):
        dequantize_kernel[(triton.cdiv(steps, 4), tiles)](data, scale, out, n, k, steps, form, num_warps=4)
    return out
