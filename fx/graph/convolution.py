"""The convolution operators, and the weight layout of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pt2mx.fx.graph.node import named_args

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
