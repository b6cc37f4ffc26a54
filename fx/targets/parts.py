"""The quantized tensors and matmuls of a converted graph as data, for adapters that write text."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import Dequantize, Quantize, dtype_of, name_of, node_arg, shape_of
from pt2mx.fx.graph.qdq import quantize_of, spec_of_dequantize
from pt2mx.spec import MXSpec

aten = torch.ops.aten
Shape = tuple[int | str, ...]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Pair:
    """A quantized tensor: a weight as codes and scales, or an activation that is quantized and dequantized.

    Args:
        name: an identifier (`identifiers`): of a weight the name of its parameter, of an activation the name of its
            node. Pairs that read the same codes have the same name.
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


def identifiers(names: Mapping[Key, str]) -> dict[Key, str]:
    """Return identifiers of MLIR and ONNX for the names of some things: ASCII letters, digits and underscores, no digit
    first, no two alike. A name that is one keeps its place, as far as no earlier thing has it."""
    taken: dict[str, Key] = {}
    for key, name in names.items():
        base = re.sub(r"^(?=\d|$)|\W", "_", name, flags=re.ASCII)
        numbered = (f"{base}_{number}" for number in itertools.count(1))
        taken[next(n for n in itertools.chain([base], numbered) if n not in taken)] = key
    return {key: identifier for identifier, key in taken.items()}


def pairs_of(model: GraphModule) -> list[Pair]:
    """Return the quantized tensors of a graph, in its order."""
    calls = dict(Dequantize.calls_in(model.graph))
    sources: dict[Node, Node | str] = {node: _stored_name(call) or node for node, call in calls.items()}
    wanted = {s: s.name if isinstance(s, Node) else s.removesuffix("_data") for s in sources.values()}
    names = identifiers(wanted)
    return [_pair(node, call, names[sources[node]]) for node, call in calls.items()]


def parts_of(model: GraphModule) -> list[Pair | Matmul]:
    """Return the linear layers of two quantized operands, and the quantized tensors that other operators read, each
    under a name of its own."""
    pairs = {pair.node: pair for pair in pairs_of(model)}
    parts: dict[object, Pair | Matmul] = {}
    numbers: Counter[str] = Counter()  # of the layers that share a weight
    for node in model.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight = (pairs.get(node_arg(node, i)) for i in range(2))
        if x is not None and weight is not None and weight.is_weight and not x.is_weight:
            parts[node] = Matmul(f"{weight.name}_matmul{numbers[weight.name] or ''}", x, weight)
            numbers[weight.name] += 1
    layers = parts.keys()
    others = [pair for node, pair in pairs.items() if not node.users.keys() <= layers]
    parts = {**parts, **{(pair.name, "pair"): pair for pair in others}}  # a weight once, however many read it
    names = identifiers({key: part.name for key, part in parts.items()})
    return [replace(part, name=names[key]) for key, part in parts.items()]


def quantized_input(pair: Pair) -> Node:
    """Return the node whose value the pair of an activation quantizes."""
    quantize = quantize_of(pair.node)
    if quantize is None:
        raise TypeError(f"{pair.name} is a weight")
    return Quantize.expect(quantize).x


def _stored_name(call: Dequantize) -> str | None:
    """Return the name of the buffer whose codes a call reads; None for an activation."""
    return name_of(call.codes) if isinstance(call.codes, Node) and call.codes.op == "get_attr" else None


def _pair(node: Node, call: Dequantize, name: str) -> Pair:
    shape, spec, dtype = shape_of(node), spec_of_dequantize(node), dtype_of(node)
    if shape is None or dtype is None:
        raise TypeError(f"{node} has no `val` meta")
    is_weight = _stored_name(call) is not None
    return Pair(name, spec.replace(axis=spec.axis % len(shape)), shape, dtype, is_weight, node)
