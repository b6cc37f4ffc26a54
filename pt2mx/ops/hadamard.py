"""`hadamard` and `rotated_fake_quantize_mx`: values rotated within blocks, and quantized in the same pass over memory.

A rotation spreads an outlier over its block. Source: the fast Walsh-Hadamard transform; QuaRot (Ashkboos et al.,
arXiv:2404.00456) rotates whole rows. A matmul stays the same if both operands are rotated along the dimension that it
reduces. The lowered program calls `rotated_fake_quantize_mx` (`pt2mx.fx.passes.fuse_rotation`), also with blocks of 1
where nothing is rotated and the values go to a matmul in bfloat16. Inductor keeps it a call: it cannot fuse a sum of 32
neighbours in one order, and makes slower code of the quantization alone.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.hadamard import rotate, rotate_back
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.activations import QuantizesRows
from pt2mx.ops.arguments import ROWS, VALUES, Axis, TargetDtype
from pt2mx.ops.checks import check_input, check_rotation, check_target_dtype
from pt2mx.ops.operator import COMPLIANT, Format, Operator, T, operator
from pt2mx.spec import MXSpec


@operator("hadamard", 2, "x's shape and dtype, contiguous", COMPLIANT)
class Hadamard(Operator[T]):
    """Values, those negated whose index in its block has an odd form b0 b1 + b2 b3 + ... of its bits, times Sylvester's
    Hadamard matrix over the square root of `size`, block by block along the axis. Sums in float32, then a cast. The
    gradient is that of the product.

    Example:
        >>> torch.ops.pt2mx.hadamard(torch.tensor([8.0, 0.0, 0.0, 0.0]), 4, -1)
        tensor([4., 4., 4., 4.])
        >>> torch.ops.pt2mx.hadamard(torch.ones(4), 4, -1)
        tensor([ 1.,  1.,  1., -1.])
    """

    x: Annotated[T, VALUES]
    size: Annotated[int, "values of a block, a power of two that divides n"]
    axis: Axis

    def check(self) -> None:
        check_rotation(self.x, self.size, self.axis)

    def decompose(self) -> Tensor:
        return rotate(*self.args)

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        return {"x": rotate_back(grad, self.size, self.axis)}


hadamard = Hadamard.overload


@operator("rotated_fake_quantize_mx", 3, "x's shape, contiguous, in `target_dtype`")
class RotatedFakeQuantize(QuantizesRows[T]):
    """`fake_quantize_mx` of `hadamard`, to the bit, both in blocks along the last dimension. The gradient is that of
    `hadamard`.

    Example:
        >>> x = torch.tensor([8.0, 0.0, 0.0, 1.0])
        >>> torch.ops.pt2mx.rotated_fake_quantize_mx(x, 4, "fp4_e2m1", 32, "floor", "even")
        tensor([4., 4., 4., 4.])
    """

    x: Annotated[T, "(..., n) float32, float16 or bfloat16 of any strides"]
    size: Annotated[int, "values that are rotated together, a power of two that divides n; 1 for none"]
    spec: Annotated[MXSpec, Format(ROWS)]
    target_dtype: Annotated[
        TargetDtype,
        "the dtype of the result; None: that of x. bfloat16 holds every element of at most 8 bits",
    ] = None

    def check(self) -> tuple[MXSpec, torch.dtype]:
        check_rotation(self.x, self.size)
        spec = check_input(self.x, self.spec)
        if ROUNDINGS[spec.rounding].random:
            raise MXError(
                f"rotated values are not rounded {spec.rounding!r} at once: use hadamard and fake_quantize_mx"
            )
        return spec, check_target_dtype(self.target_dtype, self.x)

    def decompose(self) -> Tensor:
        return self.fake_quantize(hadamard(self.x, self.size, -1))

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        return {"x": rotate_back(grad, self.size).to(ctx.dtype)}


rotated_fake_quantize_mx = RotatedFakeQuantize.overload
