"""The quantized tensors of a converted graph as data."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import Dequantize, Quantize, name_of, parameter_of, shape_of
from pt2mx.fx.graph.qdq import quantize_of, spec_of_dequantize
from pt2mx.spec import MXSpec


@dataclass(frozen=True)
class Pair:
    """A quantized tensor: a weight as codes and scales, or an activation that is quantized and dequantized.

    Args:
        name: of a weight the name of its parameter, of an activation the name of `node`.
        spec: its format; `axis` is not negative.
        shape: the shape of the values; symbolic sizes are strings.
        is_weight: True for a weight.
        node: the `dequantize_mx` node.
    """

    name: str
    spec: MXSpec
    shape: tuple[int | str, ...]
    is_weight: bool
    node: Node


def pairs_of(model: GraphModule) -> list[Pair]:
    """Return the quantized tensors of a graph, in its order."""
    return [_pair(node, call) for node, call in Dequantize.calls_in(model.graph)]


def quantized_input(pair: Pair) -> Node:
    """Return the node whose value the pair of an activation quantizes."""
    quantize = quantize_of(pair.node)
    if quantize is None:
        raise TypeError(f"{pair.name} is a weight")
    return Quantize.expect(quantize).x


def _pair(node: Node, call: Dequantize) -> Pair:
    shape, spec = shape_of(node), spec_of_dequantize(node)
    if shape is None:
        raise TypeError(f"{node} has no `val` meta")
    is_weight = call.codes.op == "get_attr"
    name = parameter_of(name_of(call.codes)) if is_weight else node.name
    return Pair(name, spec.replace(axis=spec.axis % len(shape)), shape, is_weight, node)
