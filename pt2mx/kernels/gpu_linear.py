"""Products with weights in the order of fragments (`gpu_fragments`), on an NVIDIA GPU.

Up to `_LARGEST_BATCH` rows of x the time is that of reading the weight, and `linear_kernel` reads the packed one. Above
the weight is dequantized, in halves, for torch's product. Neither waits for the device; both can be captured in a CUDA
graph, and give the same bits in every run.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu_fragments import FRAGMENTS, ROWS, decode_ptx, exponent_shift
from pt2mx.kernels.gpu_linear_kernel import Form, dequantize_kernel, linear_kernel

_LARGEST_BATCH = 32
#: tiles of the weight that are dequantized for one product: halves of 8192 rows were faster than all and than quarters
_LARGEST_PART = 256


class Shape(NamedTuple):
    """How a program works: tiles of 16 rows a warp, steps that are loaded together, and warps that share a tile, of
    which a multiprocessor should have `warps`."""

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


def linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, element: ElementFormat, n: int) -> Tensor:
    """x: (batch, K) bfloat16, contiguous, data and scale as of `to_fragments`, bias: (n,) or None -> (batch, n)."""
    out = x.new_empty(len(x), n)
    if x.data_ptr() % 16:  # as a part of a tensor may be: it is read 16 bytes at a time
        x = x.clone()
    if 0 < len(x) <= _LARGEST_BATCH:
        _small(x, data, scale, bias, out, element)
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


def _small(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, element: ElementFormat) -> None:
    (batch, k), (tiles, steps) = x.shape, data.shape[:2]
    columns = triton.next_power_of_2(triton.cdiv(batch, 8))
    shape = _SHAPES[element.bits, columns]
    programs = triton.cdiv(tiles, shape.tiles)
    wanted = shape.warps * torch.cuda.get_device_properties(x.device).multi_processor_count
    along_k = 4
    while along_k < 16 and programs * along_k < wanted and along_k * shape.steps < steps:
        along_k *= 2
    whole = k % (FRAGMENTS[element.name].step * along_k * shape.steps) == 0
    form = _form(element, shape.tiles, columns, along_k, 1, shape.steps, bias is not None, whole)
    with torch.cuda.device_of(x):
        linear_kernel[(programs,)](
            x, data, scale, bias, out, batch, out.shape[1], k, tiles, steps, form, num_warps=along_k
        )


def dequantize(data: Tensor, scale: Tensor, element: ElementFormat, n: int, k: int) -> Tensor:
    """Fragments of whole tiles -> (n, k) bfloat16."""
    out = torch.empty(n, k, dtype=torch.bfloat16, device=data.device)
    tiles, steps = data.shape[:2]
    form = _form(element, 1, 1, 4, 1, 1, False, False)
    with torch.cuda.device_of(data):
        dequantize_kernel[(triton.cdiv(steps, 4), tiles)](data, scale, out, n, k, steps, form, num_warps=4)
    return out


@functools.lru_cache(maxsize=1024)
def _form(element: ElementFormat, *of_launch: object) -> Form:
    fragment = FRAGMENTS[element.name]
    return Form(
        decode_ptx(element),
        fragment.words // 4,
        fragment.scales,
        fragment.values // 8,
        exponent_shift(element),
        *of_launch,
    )
