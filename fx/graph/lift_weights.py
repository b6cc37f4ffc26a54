"""Weights that are quantized inside a subgraph are quantized outside of it: their codes and scales become operands."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.calls import Call, call_groups, placeholders
from pt2mx.fx.graph.constants import CONSTANT_KEY, computed_from, constant_nodes
from pt2mx.fx.graph.node import Quantize


def lift_weights(model: GraphModule) -> GraphModule:
    """Move every `quantize_mx` of a constant operand out of the graphs inside `model`: they get codes and scale as
    operands instead, and lose operands that they no longer read. Changes `model` and returns it."""
    groups = call_groups(model)
    for graphs, group in groups:
        for graph in graphs:
            lift_weights(graph)
            _placeholders_first(graph)
        for graph in graphs:
            for quantize in _weights(graph):
                _lift(model, graphs, group, quantize)
        _drop_unused(graphs, group)
        for graph in graphs:
            graph.recompile()
    if groups:
        model.recompile()
    return model


def merge_equal_operands(model: GraphModule) -> GraphModule:
    """Pass a tensor that two weights have become once: torch.export takes no operand twice. Changes `model`."""
    groups = call_groups(model)
    for graphs, group in groups:
        operands = list(zip(*(call.operands() for call in group), strict=True))
        first: dict[tuple, int] = {}
        for place, pairs in enumerate(operands):
            same = first.setdefault(tuple(_identity(operand) for operand, _ in pairs), place)
            if same != place and all(is_fixed for _, is_fixed in (*pairs, *operands[same])):
                for graph in graphs:
                    standing = placeholders(graph)
                    standing[place].replace_all_uses_with(standing[same])
        _drop_unused(graphs, group)
        for graph in graphs:
            merge_equal_operands(graph)
            graph.recompile()
    if groups:
        model.recompile()
    return model


def _identity(operand: object) -> object:
    """Equal for operands that are the same tensor."""
    return ("get_attr", operand.target) if isinstance(operand, Node) and operand.op == "get_attr" else operand


def _placeholders_first(graph: GraphModule) -> None:
    """Put the placeholders before all other nodes, so that what reads one can follow one that is appended."""
    for placeholder in reversed(placeholders(graph)):
        next(iter(graph.graph.nodes)).prepend(placeholder)


def _weights(graph: GraphModule) -> list[Node]:
    """The `quantize_mx` nodes of what is computed from constant placeholders alone."""
    constants = constant_nodes(graph.graph)
    return [
        node
        for node, call in Quantize.calls_in(graph.graph)
        if call.x in constants and not any(n.op == "get_attr" for n in computed_from(call.x))
    ]


def _lift(model: GraphModule, graphs: list[GraphModule], group: list[Call], quantize: Node) -> None:
    items = [user for user in quantize.users if user.target is operator.getitem]
    for call in group:
        standing = quantize.graph.find_nodes(op="placeholder")
        own: dict[Node, Any] = dict(zip(standing, (operand for operand, _ in call.operands()), strict=True))
        with model.graph.inserting_before(call.node):
            for node in [*computed_from(quantize), *items]:
                if node.op != "placeholder":
                    own[node] = model.graph.node_copy(node, own.__getitem__)
        for item in items:
            call.append(own[item])
    for item in items:
        for graph in graphs:
            last = placeholders(graph)[-1]
            with graph.graph.inserting_after(last):
                placeholder = graph.graph.placeholder(item.name)
            placeholder.target = placeholder.name  # the name is unique
            placeholder.meta.update(item.meta)
            placeholder.meta[CONSTANT_KEY] = True
            if graph.graph is quantize.graph:
                item.replace_all_uses_with(placeholder)
    quantize.graph.eliminate_dead_code()


def _drop_unused(graphs: list[GraphModule], group: list[Call]) -> None:
    fixed = [is_fixed for _, is_fixed in group[0].operands()]
    for place in reversed(range(len(fixed))):
        standing = [placeholders(graph)[place] for graph in graphs]
        if fixed[place] and not any(node.users for node in standing):
            for call in group:
                call.remove(place)
            for node in standing:
                node.graph.erase_node(node)
