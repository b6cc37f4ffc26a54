"""Assertions on the sizes of codes, which export writes where blocks run along a dynamic dimension."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import node_arg, value_of
from pt2mx.fx.graph.tensors import erase_unused

aten = torch.ops.aten


@GraphPass
def drop_size_assertions(model: GraphModule) -> None:
    """Erase the assertions on sizes of codes and scales, and what they alone read: `quantize_mx` keeps them true, and
    a pair that something else reads is not fused."""
    for node in model.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        if _is_of_codes(node):
            condition = node_arg(node)
            model.graph.erase_node(node)
            erase_unused(condition)


def _is_of_codes(node: Node) -> bool:
    """True of a number that follows from a size of codes or scales."""
    if node.target is aten.sym_size.int:
        item = node_arg(node)
        return item.target is operator.getitem and node_arg(item).target is ops.quantize_mx
    return any(_is_of_codes(n) for n in node.all_input_nodes if not isinstance(value_of(n), Tensor))
