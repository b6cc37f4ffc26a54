"""The two products of the backward pass of a matmul or convolution: what each multiplies, and the dimension that it
reduces. The gradient and the other operand are quantized in blocks along that dimension, as in microxcaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """The gradient of one operand, a product of the result's gradient and the other operand.

    Args:
        compute: (gradient, other operand, the operand's shape, **call) -> the operand's gradient.
        axes: the dimension of blocks of the gradient, and of the other operand.
    """

    compute: Callable[..., Tensor]
    axes: tuple[int, int]


#: of the first and of the second operand
Products = tuple[Product, Product]


def _linear_input(grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    return grad @ weight


def _linear_weight(grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _matmul_first(grad: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    return (grad @ b.transpose(-1, -2)).sum_to_size(shape)


def _matmul_second(grad: Tensor, a: Tensor, shape: torch.Size) -> Tensor:
    return (a.transpose(-1, -2) @ grad).sum_to_size(shape)


def _input_gradient(grad: Tensor, weight: Tensor, shape: torch.Size, **call: Any) -> Tensor:
    return _gradients(grad, grad.new_empty(1).expand(shape), weight, [True, False, False], **call)[0]


def _weight_gradient(grad: Tensor, x: Tensor, shape: torch.Size, **call: Any) -> Tensor:
    return _gradients(grad, x, grad.new_empty(1).expand(shape), [False, True, False], **call)[1]


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: list[bool],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, ...]:
    where = stride, padding, dilation, False, [0] * len(stride), groups
    return aten.convolution_backward(grad, x, weight, None, *where, mask)


def _convolved(
    grad: Tensor,
    weight: Tensor,
    shape: torch.Size,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: object,
) -> Tensor:
    return aten.convolution(grad, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _swapped(grad: Tensor, x: Tensor, shape: torch.Size, output_padding: object, **call: Any) -> Tensor:
    return _weight_gradient(x, grad, shape, **call)


#: y = x @ weight.T
LINEAR: Products = Product(_linear_input, (-1, 0)), Product(_linear_weight, (-2, -2))
#: y = a @ b, of matrices and of batches that broadcast
MATMUL: Products = Product(_matmul_first, (-1, -1)), Product(_matmul_second, (-2, -2))
#: y = conv(x, weight), with a batch; the weight's gradient reduces the batch and positions, its blocks lie in the batch
CONVOLUTION: Products = Product(_input_gradient, (1, 0)), Product(_weight_gradient, (0, 0))
#: a transposed convolution computes the gradient of a convolution's input: x and the gradient change places
TRANSPOSED_CONVOLUTION: Products = Product(_convolved, (1, 1)), Product(_swapped, (0, 0))
