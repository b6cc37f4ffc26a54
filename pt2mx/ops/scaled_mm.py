"""`scaled_mm_mx`: matmuls of packed activations and packed weights on tensor cores that take MX.

On NVIDIA GPUs of the Blackwell generation it is `torch.nn.functional.scaled_mm`, elsewhere a plain emulation. Untested
on hardware: on the GPU's side, shapes, layouts and dtypes are checked against what torch's operator says it takes.

It is an operator of its own because Inductor (torch 2.13) asserts that the scales of torch's are not swizzled, which
those of MX have to be, and its C++ does not know their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.ops.operator import COMPLIANT, As, Operator, T, operator
from pt2mx.ops.quantization import dequantize_mx

#: values of a block
BLOCK = 32


@dataclass(frozen=True)
class Form:
    """A pair of elements that tensor cores multiply: torch's dtypes of their codes, the dtypes of a result, those of
    them to which a bias can be added at once, and the major compute capabilities of the GPUs.

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


_PAIRS = "; ".join(
    f"`{x}` x `{weight}` to {', '.join(str(dtype).removeprefix('torch.') for dtype in form.results)}"
    for (x, weight), form in FORMS.items()
)


@operator("scaled_mm_mx", 1, "(..., N) in `target_dtype`", COMPLIANT, words={"pairs": _PAIRS})
@dataclass(frozen=True, slots=True)
class ScaledMM(Operator[T]):
    """The matmul of packed activations and a packed weight, both in blocks of 32 along K, with sums in float32; K is a
    multiple of 32 and N of 16. Elements and results: {pairs}.

    Example:
        >>> swizzle = torch.ops.pt2mx.swizzle_scale
        >>> x_scale, x = pt2mx.quantize_mx(torch.arange(32.0).reshape(1, 32), "mxfp8")
        >>> scale, weight = pt2mx.quantize_mx(torch.eye(32)[:16], "mxfp8")
        >>> types = ("fp8_e4m3", "fp8_e4m3", torch.float32)
        >>> torch.ops.pt2mx.scaled_mm_mx(x, swizzle(x_scale), weight, swizzle(scale), None, *types)[0, :4]
        tensor([0., 1., 2., 3.])
    """

    x: Annotated[T, As("x_data"), "(..., bytes of K) uint8"]
    x_scale: Annotated[T, "`swizzle_scale` of x's scales"]
    weight: Annotated[T, As("weight_data"), "(N, bytes of K) uint8"]
    weight_scale: Annotated[T, "`swizzle_scale` of the weight's scales"]
    bias: Annotated[T | None, "(N,), or None"]
    x_element: Annotated[str, As("x_elem_dtype_name"), "the element of x"]
    weight_element: Annotated[str, As("weight_elem_dtype_name"), "the element of the weight"]
    target_dtype: Annotated[torch.dtype, "the dtype of the result"]

    def check(self) -> Form:
        """Return how tensor cores multiply the elements; MXError for what does not fit."""
        x, weight, dtype = self.x, self.weight, self.target_dtype
        form = FORMS.get((self.x_element, self.weight_element))
        if form is None or dtype not in form.results:
            pairs = ", ".join(f"{a} x {b} to {'/'.join(str(r) for r in f.results)}" for (a, b), f in FORMS.items())
            raise MXError(
                f"tensor cores do not multiply {self.x_element} x {self.weight_element} to {dtype}: allowed are {pairs}"
            )
        k = _values(weight, self.weight_element)
        if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or k % BLOCK or weight.shape[0] % 16:
            raise MXError(
                f"codes of shapes {tuple(x.shape)} and {tuple(weight.shape)} cannot be multiplied: they must be "
                f"(..., bytes) and (N, bytes) of the same K values, K a multiple of {BLOCK} and N of 16"
            )
        return form

    def kernel(self) -> Tensor:
        """Emulate the tensor cores, on any device."""
        self.check()
        x = _dense(self.x, self.x_scale, self.x_element)
        y = x @ _dense(self.weight, self.weight_scale, self.weight_element).t()  # (M, N)
        y = y if self.bias is None else y + self.bias
        return y.to(self.target_dtype).view(*self.x.shape[:-1], self.weight.shape[0])

    def multiply(self) -> Tensor:
        """Multiply on tensor cores."""
        form, bias = self.check(), self.bias
        is_fused = bias is not None and self.target_dtype in form.biased
        y = functional.scaled_mm(
            self.x.reshape(-1, self.x.shape[-1]).contiguous().view(form.x),  # codes lie in memory as their values did
            self.weight.contiguous().view(form.weight).t(),
            self.x_scale.view(torch.float8_e8m0fnu),
            functional.ScalingType.BlockWise1x32,
            self.weight_scale.view(torch.float8_e8m0fnu),
            functional.ScalingType.BlockWise1x32,
            functional.SwizzleType.SWIZZLE_32_4_4,
            functional.SwizzleType.SWIZZLE_32_4_4,
            bias=bias if is_fused else None,
            output_dtype=self.target_dtype,
        )
        y = y if bias is None or is_fused else y + bias
        return y.view(*self.x.shape[:-1], self.weight.shape[0])

    def fake(self) -> Tensor:
        self.check()
        return self.x.new_empty((*self.x.shape[:-1], self.weight.shape[0]), dtype=self.target_dtype)


torch.library.impl("pt2mx::scaled_mm_mx", "CUDA", ScaledMM.function(ScaledMM.multiply))


def _dense(codes: Tensor, scale: Tensor, element: str) -> Tensor:
    codes = codes.reshape(-1, codes.shape[-1])
    scale = unswizzle(scale, codes.shape[0], _values(codes, element) // BLOCK)
    return dequantize_mx(codes, scale, element, BLOCK, torch.float32, -1)


def _values(codes: Tensor, element: str) -> int:
    """Return the count of values in a row of codes."""
    return codes.shape[-1] * (2 if element == "fp4_e2m1" else 1)


@operator(
    "swizzle_scale",
    1,
    "(ceil(R / 128) * 128 * ceil(C / 4) * 4,) uint8",
    COMPLIANT,
    key="CompositeImplicitAutograd",
)
@dataclass(frozen=True, slots=True)
class SwizzleScale(Operator[T]):
    """Scales in the order in which tensor cores read them (cuBLAS, 1D Block Scaling Factors Layout): tiles of 128 rows
    and 4 columns one after the other, in a tile the 4 columns of rows r, r + 32, r + 64 and r + 96 next to each other.
    Missing rows and columns are zeros.

    Example:
        >>> swizzled = torch.ops.pt2mx.swizzle_scale(torch.tensor([[127, 128]], dtype=torch.uint8))
        >>> swizzled.shape, swizzled[:4]
        (torch.Size([512]), tensor([127, 128,   0,   0], dtype=torch.uint8))
    """

    scale: Annotated[T, "(..., C) uint8, R rows in all"]

    def kernel(self) -> Tensor:
        return swizzle(self.scale)


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


scaled_mm_mx = ScaledMM.overload
swizzle_scale = SwizzleScale.overload
