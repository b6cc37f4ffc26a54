"""The quantized tensors and matmuls of a converted graph as data, for adapters that write text."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import Dequantize, Quantize, dtype_of, name_of, node_arg, shape_of
from pt2mx.fx.graph.qdq import quantize_of, spec_of_dequantize
from pt2mx.spec import MXSpec

aten = torch.ops.aten
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Pair:
    """A quantized tensor: a weight as codes and scales, or an activation that is quantized and dequantized.

    Args:
        name: an identifier; of a weight the name of its parameter, of an activation the name of its node.
        spec: its format; `axis` is not negative.
        shape: the shape of the values; symbolic sizes are strings.
        dtype: the dtype of the values.
        is_weight: True for a weight.
        node: the `dequantize_mx` node.
    """

    name: str
    spec: MXSpec
    shape: Shape
    dtype: torch.dtype
    is_weight: bool
    node: Node

    @property
    def scale_shape(self) -> Shape:
        """The shape of the scales, one for each block along the axis."""
        axis, size = self.spec.axis, self.shape[self.spec.axis]
        blocks = size if isinstance(size, str) else -(-size // self.spec.block_size)
        return (*self.shape[:axis], blocks, *self.shape[axis + 1 :])


@dataclass(frozen=True)
class Matmul:
    """A linear layer, without its bias, of a quantized activation (..., K) and a quantized weight (N, K)."""

    name: str
    x: Pair
    weight: Pair


def pairs_of(model: GraphModule) -> list[Pair]:
    """Return the quantized tensors of a graph, in its order."""
    return [_pair(node, call) for node, call in Dequantize.calls_in(model.graph)]


def parts_of(model: GraphModule) -> list[Pair | Matmul]:
    """Return the linear layers of two quantized operands, and the quantized tensors that other operators read."""
    pairs = {pair.node: pair for pair in pairs_of(model)}
    matmuls: dict[Node, Matmul] = {}
    names: Counter[str] = Counter()
    for node in model.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight = (pairs.get(node_arg(node, i)) for i in range(2))
        if x is not None and weight is not None and weight.is_weight and not x.is_weight:
            number = names[weight.name]  # of the layers that share the weight
            names[weight.name] += 1
            matmuls[node] = Matmul(f"{weight.name}_matmul{number or ''}", x, weight)
    return [*matmuls.values(), *(pair for node, pair in pairs.items() if not node.users.keys() <= matmuls.keys())]


def quantized_input(pair: Pair) -> Node:
    """Return the node whose value the pair of an activation quantizes."""
    quantize = quantize_of(pair.node)
    if quantize is None:
        raise TypeError(f"{pair.name} is a weight")
    return Quantize.expect(quantize).x


def _pair(node: Node, call: Dequantize) -> Pair:
    shape, spec, dtype = shape_of(node), spec_of_dequantize(node), dtype_of(node)
    if shape is None or dtype is None:
        raise TypeError(f"{node} has no `val` meta")
    is_weight = isinstance(call.codes, Node) and call.codes.op == "get_attr"
    name = name_of(call.codes).removesuffix("_data") if is_weight else node.name
    name = re.sub(r"^(?=\d)|\W", "_", name)  # no identifier of MLIR or ONNX begins with a digit
    return Pair(name, spec.replace(axis=spec.axis % len(shape)), shape, dtype, is_weight, node)
