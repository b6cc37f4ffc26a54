"""`tensor_scale_mx`: the scale of a whole tensor, of formats that have one."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.float_scales import tensor_scale
from pt2mx.modes import FLOAT_SCALE_MODES
from pt2mx.ops.arguments import TENSOR_SCALED, Element, choices
from pt2mx.ops.checks import check_input
from pt2mx.ops.operator import COMPLIANT, Format, Operator, T, operator
from pt2mx.spec import MXSpec

_ARGUMENTS = {
    "element": Element,
    "scale_mode": Annotated[str, f"{choices(FLOAT_SCALE_MODES)}"],
    "scale_format": Annotated[str, TENSOR_SCALED],
}


@operator("tensor_scale_mx", 1, f"() float32: `tensor_scale` of {TENSOR_SCALED}", COMPLIANT)
class TensorScale(Operator[T]):
    """The scale of a whole tensor: with it the largest block of finite values has the largest scale. Inf and NaN do not
    count; it is 1 for a tensor of zeros, and has no gradient.

    Example:
        >>> x = torch.tensor([0.5, 2688.0, -1.0])  # 6 * 448
        >>> torch.ops.pt2mx.tensor_scale_mx(x, "fp4_e2m1", "nearest", "e4m3_f32")
        tensor(1.)
    """

    x: Annotated[T, "float32, float16 or bfloat16, of any shape"]
    spec: Annotated[MXSpec, Format(_ARGUMENTS)]

    def check(self) -> MXSpec:
        spec = check_input(self.x, self.spec.replace(axis=-1))
        if not spec.has_tensor_scale:
            raise MXError(f"{spec.scale_format} has no tensor scale: allowed are {TENSOR_SCALED}")
        return spec

    def kernel(self) -> Tensor:
        return tensor_scale(self.x, self.check())

    def fake(self) -> Tensor:
        self.check()
        return self.x.new_empty((), dtype=torch.float32)

    def remember(self, ctx: Any, outputs: Tensor) -> None:
        ctx.mark_non_differentiable(outputs)

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        return {}


tensor_scale_mx = TensorScale.overload
