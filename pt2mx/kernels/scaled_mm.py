"""Matmuls of packed activations and packed weights: what tensor cores support, and the order in which they read
scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.kernels.constants import BLOCK


@dataclass(frozen=True)
class Form:
    """A pair of elements that tensor cores multiply: torch's dtypes of their codes, the dtypes of a result, the ones to
    which a bias can be added at once, and the major compute capabilities of the GPUs.

    Source: `ScaledBlas.cpp` of torch. Its matmul of two FP4 tensors ignores a bias.
    """

    x: torch.dtype
    weight: torch.dtype
    results: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    biased: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    majors: tuple[int, ...] = (10, 11, 12)


#: elements of x and of the weight -> how they are multiplied; two E5M2 are not
FORMS = {
    ("fp8_e4m3", "fp8_e4m3"): Form(torch.float8_e4m3fn, torch.float8_e4m3fn),
    ("fp8_e4m3", "fp8_e5m2"): Form(torch.float8_e4m3fn, torch.float8_e5m2),
    ("fp8_e5m2", "fp8_e4m3"): Form(torch.float8_e5m2, torch.float8_e4m3fn),
    ("fp4_e2m1", "fp4_e2m1"): Form(
        torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2, results=(torch.bfloat16,), biased=(), majors=(10,)
    ),
}


def unpacked(codes: Tensor, scale: Tensor, element: str) -> Tensor:
    """codes: (rows, bytes of K) uint8, with scales in the order of `swizzle` -> (rows, K) float32."""
    k = values_of(codes, element)
    scale = unswizzle(scale, codes.shape[0], k // BLOCK)
    return torch.ops.pt2mx.dequantize_mx(codes, scale, element, BLOCK, torch.float32, 1, k)


def values_of(codes: Tensor, element: str) -> int:
    """Return the number of values in a row of codes."""
    return codes.shape[-1] * (2 if element == "fp4_e2m1" else 1)


def swizzle(scale: Tensor) -> Tensor:
    """Return the scales of a matrix in the order in which tensor cores read them.

    Tiles of 128 rows and 4 columns lie one after the other, and in a tile the 4 columns of rows r, r + 32, r + 64 and
    r + 96 next to each other, for r from 0 to 31. Missing rows and columns are filled with 0. Source: cuBLAS
    documentation, "1D Block Scaling Factors Layout"; `SwizzleType.SWIZZLE_32_4_4`.

    scale: (..., C) uint8, R rows in all -> (ceil(R / 128) * 128 * ceil(C / 4) * 4,) uint8.
    """
    scale = scale.reshape(-1, scale.shape[-1])  # (R, C)
    rows, columns = scale.shape
    across = (columns + 3) // 4  # tiles
    # By position, not by views: of a dimension that holds the tiles, tracing would ask whether it is 1.
    position = torch.arange((rows + 127) // 128 * across * 512, device=scale.device)
    tile = position // 512
    row = tile // across * 128 + position % 16 // 4 * 32 + position % 512 // 16
    column = tile % across * 4 + position % 4
    values = scale[row.clamp(max=rows - 1), column.clamp(max=columns - 1)]
    return torch.where((row < rows) & (column < columns), values, 0)


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the (rows, columns) matrix from which `swizzle` made these scales."""
    tiles = scale.view((rows + 127) // 128, (columns + 3) // 4, 32, 4, 4)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape((rows + 127) // 128 * 128, (columns + 3) // 4 * 4)
    return matrix[:rows, :columns]
