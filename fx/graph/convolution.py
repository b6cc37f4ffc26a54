"""Convolutions, and the batch norms that can be folded into the layer before them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import args_of, dtype_of, name_of, named_args, value_of

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
_BATCH_NORMS = (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default)
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


def batch_norms(graph: Graph) -> list[Node]:
    """Return the calls of batch norms that can be folded, in the order of the graph."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in _BATCH_NORMS]


def keep_batch_norms(model: GraphModule) -> GraphModule:
    """Put an `alias` before each batch norm that must not be folded: its producer, or the producer's weight, has other
    users; it normalizes another dimension than the producer's outputs; it has no running statistics; it follows a
    transposed convolution in groups; a tensor of the norm or the layer is computed, or written by the graph.

    torchao folds a batch norm into the convolution or linear layer before it without checking any of this, which would
    change the outputs. The alias hides such norms from it. Changes `model` and returns it.
    """
    norms = batch_norms(model.graph)
    if not norms:
        return model
    user_counts: Counter[str] = Counter()
    for node in model.graph.find_nodes(op="get_attr"):
        user_counts[name_of(node)] += len(node.users)
    written = written_nodes(model.graph)
    for norm in norms:
        producer = BatchNorm.of(norm).x
        if producer.target in LAYERS and not _can_be_folded(producer, norm, user_counts, written):
            with model.graph.inserting_before(norm):
                alias = model.graph.call_function(aten.alias.default, (producer,))
            alias.meta.update(producer.meta)
            norm.replace_input_with(producer, alias)
    model.recompile()
    return model


def _can_be_folded(layer: Node, norm: Node, user_counts: Counter[str], written: set[Node]) -> bool:
    """Return whether folding the batch norm changes no output of the model."""
    _, weight, bias, *_ = named_args(layer).values()
    weights = [n for n in layer.all_input_nodes if n.op == "get_attr"]
    if len(layer.users) > 1 or any(user_counts[name_of(n)] > 1 for n in weights):
        return False
    tensors = [n for n in (weight, bias, *BatchNorm.of(norm)[1:]) if isinstance(n, Node)]
    if any(n.op != "get_attr" or n in written for n in tensors):
        return False
    convolution = Convolution.of(layer)
    if convolution is not None and convolution.transposed and convolution.groups > 1:
        return False
    return normalizes_outputs(layer, norm)


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
