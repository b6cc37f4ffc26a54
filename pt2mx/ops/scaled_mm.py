"""`scaled_mm_mx`, `swizzle_scale`: matmuls of packed activations and packed weights on tensor cores that take MX.

On NVIDIA GPUs of the Blackwell generation `torch.nn.functional.scaled_mm` computes it, elsewhere a plain emulation
(`pt2mx.kernels.scaled_mm`). It is an operator of its own because Inductor (torch 2.13) asserts that scales of
torch's operator are not swizzled, as MX scales must be, and its C++ does not know their dtype.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.scaled_mm import FORMS, swizzle, unpacked, values_of
from pt2mx.ops.operator import COMPLIANT, As, Operator, T, operator

_PAIRS = "; ".join(
    f"`{x}` x `{weight}` to {', '.join(str(dtype).removeprefix('torch.') for dtype in form.results)}"
    for (x, weight), form in FORMS.items()
)


@operator("scaled_mm_mx", 1, "(..., N) in `target_dtype`", COMPLIANT, words={"pairs": _PAIRS})
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

    def check(self) -> None:
        x, weight, dtype = self.x, self.weight, self.target_dtype
        form = FORMS.get((self.x_element, self.weight_element))
        if form is None or dtype not in form.results:
            pairs = ", ".join(f"{a} x {b} to {'/'.join(str(r) for r in f.results)}" for (a, b), f in FORMS.items())
            raise MXError(
                f"tensor cores do not multiply {self.x_element} x {self.weight_element} to {dtype}: allowed are {pairs}"
            )
        k = values_of(weight, self.weight_element)
        if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or k % BLOCK or weight.shape[0] % 16:
            raise MXError(
                f"codes of shapes {tuple(x.shape)} and {tuple(weight.shape)} cannot be multiplied: they must be "
                f"(..., bytes) and (N, bytes) of the same K values, K a multiple of {BLOCK} and N of 16"
            )

    def define(self) -> Tensor:
        x = unpacked(self.x.reshape(-1, self.x.shape[-1]), self.x_scale, self.x_element)
        y = x @ unpacked(self.weight, self.weight_scale, self.weight_element).t()
        return (y if self.bias is None else y + self.bias).to(self.target_dtype).view(self.result_shape)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.weight.shape[0])


@operator(
    "swizzle_scale",
    1,
    "(ceil(R / 128) * 128 * ceil(C / 4) * 4,) uint8",
    COMPLIANT,
    key="CompositeImplicitAutograd",
)
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


scaled_mm_mx = ScaledMM.overload
swizzle_scale = SwizzleScale.overload
