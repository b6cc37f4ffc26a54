"""Constant nodes, computed from parameters and buffers alone: find them, evaluate them, hoist them out of subgraphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.higher_order_ops import HOPCall, call_groups, graph_modules, placeholders
from pt2mx.fx.graph.node import (
    Quantize,
    attribute_of,
    dtype_of,
    function_of,
    model_of,
    name_of,
    register_buffer,
    result_of,
    tensor_of,
)

#: meta key of a subgraph's placeholder: whether its operand is a constant (`mark_constants`)
CONSTANT_KEY = "mx_constant"
#: meta key of a node that `hoist_constants` hoists
_HOIST_KEY = "mx_hoist"


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


def parameters_behind(node: Node) -> set[nn.Parameter]:
    """Return the parameters that a node is computed from; none if it is also computed from an input of the model."""
    model = model_of(node.graph)
    pending, seen, found = [node], {node}, set[nn.Parameter]()
    while pending:
        current = pending.pop()
        if current.op == "get_attr":
            attribute = attribute_of(model, current)
            if isinstance(attribute, nn.Parameter):
                found.add(attribute)
        elif not current.all_input_nodes:
            return set()
        before = set(current.all_input_nodes) - seen
        seen |= before
        pending += before
    return found


def mark_constants(model: GraphModule) -> None:
    """Mark the placeholders of subgraphs whose operands are constant tensors in every call."""
    groups = call_groups(model)
    constants = constant_nodes(model.graph) if groups else set()
    for graphs, group in groups:
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
    first_of: dict[Node, Node] = {}
    for node in model.graph.nodes:
        if node in constants:
            if node.op == "get_attr":
                key: object = id(attribute_of(model, node))
            else:
                key = repr((node.target, *torch.fx.map_arg((node.args, node.kwargs), first_of.__getitem__)))
            first_of[node] = first.setdefault(key, node)
    return first_of


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


def hoist_weights(model: GraphModule) -> GraphModule:
    """Hoist every `quantize_mx` of a constant operand out of the subgraphs of `model`.

    The subgraphs get codes and scales as operands instead, and lose the operands that they no longer use. Changes
    `model` and returns it.
    """
    return _hoist_all(model, lambda graph: [_items(quantize) for quantize in _weights(graph)])


def hoist_tensor_scales(model: GraphModule) -> GraphModule:
    """Hoist the buffers with static tensor scales out of the subgraphs of `model`, which torch.export wants without
    tensors of their own. Changes `model` and returns it."""

    def buffers(graph: GraphModule) -> list[list[Node]]:
        scales = dict.fromkeys(call.tensor_scale for _, call in Quantize.calls_in(graph.graph))
        return [[t] for t in scales if t is not None and t.op == "get_attr"]

    return _hoist_all(model, buffers)


def hoist_constants(model: GraphModule, chosen: set[Node]) -> GraphModule:
    """Hoist the computation of the constants `chosen` out of the subgraphs of `model`. Changes `model` and returns
    it."""
    mark_constants(model)
    for node in chosen:
        node.meta[_HOIST_KEY] = True  # copies of the node inherit the key

    def computed(graph: GraphModule) -> list[list[Node]]:
        constants = constant_nodes(graph.graph)
        return [[n] for n in constants if n.meta.get(_HOIST_KEY) and n.op == "call_function"]

    _hoist_all(model, computed)
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            node.meta.pop(_HOIST_KEY, None)
    return model


def _hoist_all(model: GraphModule, find: Callable[[GraphModule], list[list[Node]]]) -> GraphModule:
    """Hoist the lists of nodes that `find` returns for each subgraph of `model`, each list together."""
    groups = call_groups(model)
    for graphs, group in groups:
        for graph in graphs:
            _hoist_all(graph, find)
            placeholders_first(graph)
        for graph in graphs:
            for nodes in find(graph):
                if not any(call.is_autocast for call in group) or _is_as_outside(nodes):
                    _hoist(model, graphs, group, nodes)
        _drop_unused(graphs, group)
        for graph in graphs:
            graph.recompile()
    if groups:
        model.recompile()
    return model


def merge_equal_operands(model: GraphModule) -> GraphModule:
    """Pass each tensor to a subgraph only once, because torch.export rejects duplicate operands. Changes `model`."""
    groups = call_groups(model)
    for graphs, group in groups:
        operands = list(zip(*(call.operands() for call in group), strict=True))
        first: dict[tuple, int] = {}
        for index, pairs in enumerate(operands):
            same = first.setdefault(tuple(_identity(operand) for operand, _ in pairs), index)
            if same != index and all(is_fixed for _, is_fixed in (*pairs, *operands[same])):
                for graph in graphs:
                    inputs = placeholders(graph)
                    inputs[index].replace_all_uses_with(inputs[same])
        _drop_unused(graphs, group)
        for graph in graphs:
            merge_equal_operands(graph)
            graph.recompile()
    if groups:
        model.recompile()
    return model


def _identity(operand: object) -> object:
    """Return a key that is equal for operands that are the same tensor."""
    return ("get_attr", operand.target) if isinstance(operand, Node) and operand.op == "get_attr" else operand


def placeholders_first(graph: GraphModule) -> None:
    """Move the placeholders before all other nodes, so that any node may use an appended placeholder."""
    for placeholder in reversed(placeholders(graph)):
        next(iter(graph.graph.nodes)).prepend(placeholder)


def _weights(graph: GraphModule) -> list[Node]:
    """Return the `quantize_mx` nodes whose input is computed from constant placeholders alone."""
    constants = constant_nodes(graph.graph)
    return [
        node
        for node, call in Quantize.calls_in(graph.graph)
        if call.x in constants and not any(n.op == "get_attr" for n in computed_from(call.x))
    ]


def _items(quantize: Node) -> list[Node]:
    """Return the `getitem` nodes of codes and scales, and the node that computes the tensor scale."""
    t = Quantize.expect(quantize).tensor_scale
    of_tensor = [t] if t is not None and t.op == "call_function" else []
    return [*(user for user in quantize.users if user.target is operator.getitem), *of_tensor]


def _is_as_outside(nodes: list[Node]) -> bool:
    """Return whether nodes that are computed inside autocast get the same dtypes outside."""
    computed = {n for node in nodes for n in computed_from(node) if n.op == "call_function"}
    return all(dtype_of(n) is None or dtype_of(n) == result_of(n).dtype for n in computed)


def _hoist(model: GraphModule, graphs: list[GraphModule], group: list[HOPCall], nodes: list[Node]) -> None:
    inner = nodes[0].graph
    computed = {n for node in nodes for n in computed_from(node) if n.op != "placeholder"}
    order = [node for node in inner.nodes if node in computed]
    for call in group:
        inputs = inner.find_nodes(op="placeholder")
        outside: dict[Node, Any] = dict(zip(inputs, (operand for operand, _ in call.operands()), strict=True))
        with model.graph.inserting_before(call.node):
            for node in order:
                outside[node] = _copy(model, node, outside)
        for node in nodes:
            call.append(outside[node])
    for item in nodes:
        for graph in graphs:
            last = placeholders(graph)[-1]
            with graph.graph.inserting_after(last):
                placeholder = graph.graph.placeholder(item.name)
            placeholder.target = placeholder.name  # the name is unique
            placeholder.meta.update(item.meta)
            placeholder.meta[CONSTANT_KEY] = True
            if graph.graph is inner:
                item.replace_all_uses_with(placeholder)
    inner.eliminate_dead_code()


def _copy(model: GraphModule, node: Node, outside: dict[Node, Any]) -> Node:
    """Copy a node into the graph of `model`, and the tensor that it reads into `model`."""
    copy = model.graph.node_copy(node, outside.__getitem__)
    if node.op == "get_attr":
        copy.target = register_buffer(model, name_of(node), tensor_of(model_of(node.graph), node))
    return copy


def _drop_unused(graphs: list[GraphModule], group: list[HOPCall]) -> None:
    fixed = [is_fixed for _, is_fixed in group[0].operands()]
    for index in reversed(range(len(fixed))):
        inputs = [placeholders(graph)[index] for graph in graphs]
        if fixed[index] and not any(node.users for node in inputs):
            for call in group:
                call.remove(index)
            for node in inputs:
                node.graph.erase_node(node)
