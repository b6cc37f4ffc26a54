"""Activations and layer norms before a quantization, which its kernel can compute."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from pt2mx.fx.graph.node import named_args, set_value, shape_of, value_of

aten = torch.ops.aten

NAMES: dict[object, str] = {
    aten.gelu.default: "gelu",
    aten.silu.default: "silu",
    aten.relu.default: "relu",
}


class Norm(NamedTuple):
    """A layer norm along the last dimension, of the sum of x and what is added to it."""

    node: Node
    x: Node
    residual: Node | None
    weight: Node | None
    bias: Node | None
    eps: float


def activation_before(x: Node, written: set[Node]) -> tuple[str, Node]:
    """The name of the activation that gives x to its one reader, and what it is computed of; "none" and x where it is
    none of those that kernels know, or what it is computed of is written."""
    name = NAMES.get(x.target)
    if name is None or len(x.users) > 1 or not written.isdisjoint((x, *x.all_input_nodes)):
        return "none", x
    given = named_args(x)
    if name == "gelu" and given["approximate"] == "tanh":
        name = "gelu_tanh"
    return name, given[next(iter(given))]


def norm_before(x: Node, written: set[Node]) -> Norm | None:
    """The layer norm of which x is the result, maybe through a dropout that does nothing; None where it is another
    node, or written."""
    while x.target is aten.dropout.default and not named_args(x)["train"] and x not in written:
        x = named_args(x)["input"]
    if x.target is not aten.layer_norm.default or x in written:
        return None
    given, shape = named_args(x), shape_of(x)
    source = given["input"]
    if shape is None or list(given["normalized_shape"]) != list(shape[-1:]):
        return None
    of_norm = source, None, given["weight"], given["bias"], given["eps"]
    if source.target is aten.add.Tensor and len(source.users) == 1:
        added = named_args(source)
        a, b = added["self"], added["other"]
        alike = shape_of(a) == shape_of(b) == shape and value_of(a).dtype == value_of(b).dtype == value_of(x).dtype
        if added["alpha"] == 1 and alike and written.isdisjoint((a, b)):
            of_norm = a, b, *of_norm[2:]
    return Norm(x, *of_norm)


def call_before(place: Node, target: object, *args: Any) -> Node:
    """Insert a call, with its value."""
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args)  # type: ignore[arg-type]
    set_value(node)
    return node
