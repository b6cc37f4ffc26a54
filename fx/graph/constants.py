"""Constant nodes: those that are computed from parameters and buffers alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.higher_order_ops import call_groups, placeholders
from pt2mx.fx.graph.node import attribute_of, function_of, name_of

#: meta key of a subgraph's placeholder: whether its operand is a constant (`mark_constants`)
CONSTANT_KEY = "mx_constant"


def constant_nodes(graph: Graph, is_pure: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """Return the constant nodes of a graph.

    These are parameters and buffers that the graph does not write, placeholders marked constant, and deterministic
    functions of constants alone (a view, transpose, cast or split of a weight, the product of two parameters).
    `is_pure` says which other nodes count as deterministic functions.
    """
    written = written_nodes(graph)
    constants: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            constant = True
        elif node.op == "placeholder":
            constant = node.meta.get(CONSTANT_KEY, False)
        else:
            constant = bool(inputs) and all(n in constants for n in inputs) and (_is_pure(node) or is_pure(node))
        if constant and node not in written:
            constants.add(node)
    return constants


def mark_constants(model: GraphModule) -> None:
    """Mark the placeholders of subgraphs whose operands are constant tensors in every call."""
    constants = constant_nodes(model.graph)
    for graphs, group in call_groups(model):
        fixed = [
            all(is_fixed and operand in constants for operand, is_fixed in operands)
            for operands in zip(*(call.operands() for call in group), strict=True)
        ]
        for graph in graphs:
            for placeholder, constant in zip(placeholders(graph), fixed, strict=True):
                placeholder.meta[CONSTANT_KEY] = constant
            mark_constants(graph)


def evaluate(model: GraphModule, node: Node) -> Tensor:
    """Return the value of a constant node."""
    values: dict[Node, Any] = {}
    for current in computed_from(node):
        if current.op == "get_attr":
            values[current] = attribute_of(model, current)
        else:
            args, kwargs = torch.fx.map_arg((current.args, current.kwargs), values.__getitem__)
            values[current] = function_of(current)(*args, **kwargs)
    return values[node]


def computed_from(node: Node) -> list[Node]:
    """Return a node and everything that it is computed from, in execution order."""
    if not node.all_input_nodes:
        return [node]
    needed, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current not in needed:
            needed.add(current)
            pending.extend(current.all_input_nodes)
    return [n for n in node.graph.nodes if n in needed]


def first_equal(model: GraphModule, constants: set[Node]) -> dict[Node, Node]:
    """Map each constant node to the first node that computes the same from the same tensors, under any name. Most nodes
    map to themselves."""
    first: dict[object, Node] = {}
    found: dict[Node, Node] = {}
    for node in model.graph.nodes:
        if node in constants:
            if node.op == "get_attr":
                key: object = id(attribute_of(model, node))
            else:
                key = repr((node.target, *torch.fx.map_arg((node.args, node.kwargs), found.__getitem__)))
            found[node] = first.setdefault(key, node)
    return found


def root_name(node: Node) -> str:
    """Return the qualified name of the first parameter or buffer that a constant node is computed from."""
    while node.op != "get_attr":
        node = node.all_input_nodes[0]
    return name_of(node)


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and not node.target._schema.is_mutable
    )
