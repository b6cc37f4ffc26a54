"""Operators called as modules, one config for weights and activations, and the same quantization by hand."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pt2mx import MXQuantizationConfig, MXQuantizer, fake_quantize_mx

W, A = "mxfp6_e2m3{16}", "mxfp8_e4m3{16}"
BOTH = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))


def w(x: Tensor, axis: int) -> Tensor:
    return fake_quantize_mx(x, W, axis=axis)


def a(x: Tensor, axis: int) -> Tensor:
    return fake_quantize_mx(x, A, axis=axis)


class Call(nn.Module):
    """`function(*inputs, *parameters)`."""

    def __init__(self, function: Callable, *shapes: tuple[int, ...]):
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.p = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs, *self.p)
