"""`torch.ops.pt2mx.scaled_mm_mx`: products of packed activations and packed weights on tensor cores that take MX.

On NVIDIA GPUs of the Blackwell generation it is `torch.nn.functional.scaled_mm`, elsewhere a plain emulation. Untested
on hardware: on the GPU's side, shapes, layouts and dtypes are checked against what torch's operator says it takes.

It is an operator of its own because Inductor (torch 2.13) asserts that the scales of torch's are not swizzled, which
those of MX have to be, and its C++ does not know their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import ops
from pt2mx.errors import MXError

#: values of a block
BLOCK = 32


@dataclass(frozen=True)
class Form:
    """A pair of elements that tensor cores multiply: torch's dtypes of their codes, the dtypes of a result, those of
    them to which a bias can be added at once, and the major compute capabilities of the GPUs.

    Source: `ScaledBlas.cpp` of torch. Its product of two FP4 tensors ignores a bias.
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


def swizzle(scale: Tensor) -> Tensor:
    """Return the scales of a matrix in the order in which tensor cores read them.

    Tiles of 128 rows and 4 columns lie one after the other, and in a tile the 4 columns of rows r, r + 32, r + 64 and
    r + 96 beside each other, for r from 0 to 31. Missing rows and columns are filled with 0. Source: cuBLAS
    documentation, "1D Block Scaling Factors Layout"; `SwizzleType.SWIZZLE_32_4_4`.

    scale: (..., C) uint8, R rows in all -> (ceil(R / 128) * 128 * ceil(C / 4) * 4,) uint8.
    """
    scale = scale.reshape(-1, scale.shape[-1])  # (R, C)
    rows, columns = scale.shape
    across = (columns + 3) // 4  # tiles
    # By position, not by views: of a dimension that holds the tiles, tracing would ask whether it is 1.
    place = torch.arange((rows + 127) // 128 * across * 512, device=scale.device)
    tile = place // 512
    row = tile // across * 128 + place % 16 // 4 * 32 + place % 512 // 16
    column = tile % across * 4 + place % 4
    found = scale[row.clamp(max=rows - 1), column.clamp(max=columns - 1)]
    return torch.where((row < rows) & (column < columns), found, 0)


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the (rows, columns) matrix of which `swizzle` made these scales."""
    tiles = scale.view((rows + 127) // 128, (columns + 3) // 4, 32, 4, 4)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape((rows + 127) // 128 * 128, (columns + 3) // 4 * 4)
    return matrix[:rows, :columns]


def _emulate(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_elem: str,
    weight_elem: str,
    dtype: torch.dtype,
) -> Tensor:
    _check(x, x_scale, weight, weight_scale, x_elem, weight_elem, dtype)

    def dense(data: Tensor, scale: Tensor, elem: str) -> Tensor:
        data = data.reshape(-1, data.shape[-1])
        blocks = _values(data, elem) // BLOCK
        scale = unswizzle(scale, data.shape[0], blocks)
        return ops.dequantize_mx(data, scale, elem, BLOCK, torch.float32)

    y = dense(x, x_scale, x_elem) @ dense(weight, weight_scale, weight_elem).t()  # (M, N)
    y = y if bias is None else y + bias
    return y.to(dtype).view(*x.shape[:-1], weight.shape[0])


def _multiply(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_elem: str,
    weight_elem: str,
    dtype: torch.dtype,
) -> Tensor:
    form = _check(x, x_scale, weight, weight_scale, x_elem, weight_elem, dtype)
    at_once = bias is not None and dtype in form.biased
    y = F.scaled_mm(
        x.reshape(-1, x.shape[-1]).contiguous().view(form.x),  # codes lie in memory as their values did
        weight.contiguous().view(form.weight).t(),
        x_scale.view(torch.float8_e8m0fnu),
        F.ScalingType.BlockWise1x32,
        weight_scale.view(torch.float8_e8m0fnu),
        F.ScalingType.BlockWise1x32,
        F.SwizzleType.SWIZZLE_32_4_4,
        F.SwizzleType.SWIZZLE_32_4_4,
        bias=bias if at_once else None,
        output_dtype=dtype,
    )
    y = y if bias is None or at_once else y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def _fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_elem: str,
    weight_elem: str,
    dtype: torch.dtype,
) -> Tensor:
    _check(x, x_scale, weight, weight_scale, x_elem, weight_elem, dtype)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _values(data: Tensor, elem: str) -> int:
    """Return the count of values in a row of codes."""
    return data.shape[-1] * (2 if elem == "fp4_e2m1" else 1)


def _check(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, x_elem: str, weight_elem: str, dtype: torch.dtype
) -> Form:
    form = FORMS.get((x_elem, weight_elem))
    if form is None or dtype not in form.results:
        pairs = ", ".join(f"{a} x {b} to {'/'.join(str(r) for r in f.results)}" for (a, b), f in FORMS.items())
        raise MXError(f"tensor cores do not multiply {x_elem} x {weight_elem} to {dtype}: allowed are {pairs}")
    sizes = (_values(weight, weight_elem), weight.shape[0])
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or sizes[0] % BLOCK or sizes[1] % 16:
        raise MXError(
            f"codes of shapes {tuple(x.shape)} and {tuple(weight.shape)} cannot be multiplied: they must be "
            f"(..., bytes) and (N, bytes) of the same K values, K a multiple of {BLOCK} and N of 16"
        )
    return form


torch.library.define(
    "pt2mx::scaled_mm_mx",
    "(Tensor x_data, Tensor x_scale, Tensor weight_data, Tensor weight_scale, Tensor? bias, str x_elem_dtype_name, "
    "str weight_elem_dtype_name, ScalarType target_dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl("pt2mx::scaled_mm_mx", "CompositeExplicitAutograd", _emulate)
torch.library.impl("pt2mx::scaled_mm_mx", "CUDA", _multiply)
torch.library.register_fake("pt2mx::scaled_mm_mx", _fake)

torch.library.define("pt2mx::swizzle_scale", "(Tensor scale) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.impl("pt2mx::swizzle_scale", "CompositeImplicitAutograd", swizzle)

#: x_data: (..., bytes of K), weight_data: (N, bytes of K), x_scale, weight_scale: swizzled, all uint8; bias: (N,)
#: -> (..., N) in target_dtype
scaled_mm_mx = torch.ops.pt2mx.scaled_mm_mx.default
#: `swizzle`
swizzle_scale = torch.ops.pt2mx.swizzle_scale.default
