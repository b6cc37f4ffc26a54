"""Convolutions, and the batch norms that normalize the outputs of the layer before them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from pt2mx.fx.graph.node import args_of, dtype_of, named_args, value_of

aten = torch.ops.aten


class ConvolutionKind(NamedTuple):
    """The number of spatial dimensions, and whether the convolution is transposed."""

    dimensions: int
    transposed: bool = False


#: operators that are of one kind; `aten.convolution`, to which they decompose, takes its kind as arguments
CONVOLUTIONS: dict[OpOverload, ConvolutionKind] = {
    aten.conv1d.default: ConvolutionKind(1),
    aten.conv1d.padding: ConvolutionKind(1),
    aten.conv2d.default: ConvolutionKind(2),
    aten.conv2d.padding: ConvolutionKind(2),
    aten.conv3d.default: ConvolutionKind(3),
    aten.conv3d.padding: ConvolutionKind(3),
    aten.conv_transpose1d.default: ConvolutionKind(1, transposed=True),
    aten.conv_transpose2d.input: ConvolutionKind(2, transposed=True),
    aten.conv_transpose3d.input: ConvolutionKind(3, transposed=True),
}
#: layers (x, weight, bias or None, ...) into which a following batch norm can be folded
LAYERS: frozenset[object] = frozenset((aten.linear.default, *CONVOLUTIONS))


class Convolution(NamedTuple):
    """A call of a convolution. Its weight is (out, in / groups, *kernel); transposed, it is (in, out / groups,
    *kernel). The inputs of a group affect only the outputs of that group.

    dimensions: the number of spatial dimensions; groups: the number of channel groups.
    """

    dimensions: int
    transposed: bool
    groups: int

    @classmethod
    def of(cls, node: Node) -> Convolution | None:
        """Return the convolution that a `call_function` node calls; None for another node."""
        if node.target is aten.convolution.default:
            args = named_args(node)
            return cls(len(args["stride"]), args["transposed"], args["groups"])
        if not isinstance(node.target, OpOverload) or node.target not in CONVOLUTIONS:
            return None
        return cls(*CONVOLUTIONS[node.target], named_args(node)["groups"])


class BatchNorm(NamedTuple):
    """The first arguments, which all batch norm operators share. x: (N, C, ...), the others: (C,) or None."""

    x: Node
    gamma: Node | None
    beta: Node | None
    mean: Node | None
    variance: Node | None

    @classmethod
    def of(cls, norm: Node) -> BatchNorm:
        """Return the arguments of a node that calls a batch norm, directly or as a `TrainEvalOp`."""
        return cls(*args_of(norm)[:5])


def normalizes_outputs(layer: Node, norm: Node) -> bool:
    """Return whether a batch norm normalizes the output channels of a convolution or linear layer by running
    statistics, all in one dtype.

    A batch norm's channels are dimension 1. Output channels are dimension 0 of an unbatched convolution, and the last
    dimension of a linear layer.
    """
    _, gamma, _, mean, variance = BatchNorm.of(norm)
    value, weight = value_of(layer), value_of(named_args(layer)["weight"])
    if mean is None or not isinstance(value, Tensor) or not isinstance(weight, Tensor):
        return False
    batched = value.dim() == (2 if layer.target is aten.linear.default else weight.dim())
    return batched and dtype_of(variance) == weight.dtype and (gamma is None or dtype_of(gamma) == weight.dtype)
