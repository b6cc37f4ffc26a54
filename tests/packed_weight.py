"""A weight of codes and scales, and its users."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2mx import ops, quantize_mx
from pt2mx.ops import linear
from tests.graph import calls

#: the matmuls with such a weight
PACKED = (linear.linear_mx, linear.grouped_linear_mx)


class PackedWeight(nn.Module):
    """The buffers `data` and `scale`."""

    def __init__(self, shape: tuple[int, ...], name: str = "fp4_e2m1", axis: int = -1, dtype=torch.float32) -> None:
        super().__init__()
        weight = torch.randn(shape)
        scale, data = quantize_mx(weight, name, axis=axis)
        self.register_buffer("data", data)
        self.register_buffer("scale", scale)
        self.modes = (name, 32, dtype, axis, weight.shape[axis])

    def weight(self) -> Tensor:
        return ops.dequantize_mx(self.data, self.scale, *self.modes)


class Matmul(PackedWeight):
    """Apply `matmul` to x, the weight and a bias."""

    def __init__(self, matmul: Callable, shape=(24, 70), name="fp4_e2m1", axis=-1, dtype=torch.float32) -> None:
        super().__init__(shape, name, axis, dtype)
        self.bias = nn.Parameter(torch.randn(24, dtype=dtype), False)
        self.matmul = matmul

    def forward(self, x: Tensor, *args: Tensor) -> object:
        return self.matmul(x, self.weight(), self.bias, *args)


class Gather(PackedWeight):
    """Apply `read` to the weight, 16 rows of 70, and to indices."""

    def __init__(self, read: Callable, name="fp4_e2m1", axis=-1, dtype=torch.float32) -> None:
        super().__init__((16, 70), name, axis, dtype)
        self.read = read

    def forward(self, ids: Tensor) -> object:
        return self.read(self.weight(), ids)


def is_packed(model: GraphModule) -> bool:
    """Return whether the matmuls of a graph read codes and scales."""
    return bool(calls(model, *PACKED)) and not calls(model, ops.dequantize_mx)
