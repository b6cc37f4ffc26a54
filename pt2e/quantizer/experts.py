"""The experts of a mixture in a graph: the routers that choose them, and the parameters that hold a slice for each.

transformers sorts rows by expert for a grouped matmul, or gathers the weight of each row (`weight[ids]`). The ends of
the groups, and the ids, are computed from the results of a router.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.constants import parameters_behind
from pt2mx.fx.graph.higher_order_ops import graph_modules, passed_values
from pt2mx.fx.graph.node import args_of, called
from pt2mx.pt2e.quantizer.operators import GROUPED, OPERANDS, operator_name, reduces

#: placeholder or result of a subgraph -> the values that it may have (`passed_values`)
Passed = Mapping[Node, list[object]]


def routers(model: GraphModule) -> set[Node]:
    """Return the matmuls whose results choose the experts of a row, also in subgraphs."""
    return _routers(model, passed_values(model))


def expert_parameters(model: GraphModule) -> set[nn.Parameter]:
    """Return the parameters with a slice for each expert along the first dimension, weights and biases."""
    passed = passed_values(model)
    chosen_by = _routers(model, passed)
    found: set[nn.Parameter] = set()
    for module in graph_modules(model):
        for parameters, choice, is_weight in _choices(module.graph):
            if is_weight or not chosen_by.isdisjoint(_deciding(choice, passed)):
                found |= parameters
    return found


def _routers(model: GraphModule, passed: Passed) -> set[Node]:
    choices = [choice for module in graph_modules(model) for choice in _choices(module.graph)]
    return set().union(*(_deciding(node, passed) for _, node, is_weight in choices if is_weight))


def _choices(graph: Graph) -> Iterator[tuple[set[nn.Parameter], Node, bool]]:
    """Yield the parameters whose slices a node chooses, that node, and whether they are weights of experts."""
    for node in graph.nodes:
        if operator_name(called(node)) in GROUPED:
            _, weight, *others = args_of(node)
            if others and isinstance(others[0], Node):  # the ends; without them all experts have as many rows
                yield parameters_behind(weight), others[0], True
        elif node.target is torch.ops.aten.index.Tensor:
            tensor, indices = args_of(node)
            if len(indices) == 1 and (parameters := parameters_behind(tensor)):
                yield parameters, indices[0], any(parameter.dim() == 3 for parameter in parameters)


def _deciding(choice: Node, passed: Passed) -> set[Node]:
    """Return the matmuls from whose results a node is computed without another matmul between.

    The router is the last: scores that are divided by the norm of a row are computed from the matmuls before it, too.
    """
    found = {node for node in _behind([choice], passed, to_matmuls=True) if _is_matmul(node)}
    if len(found) > 1:
        found -= _behind([n for node in found for n in node.all_input_nodes], passed, to_matmuls=False)
    return found


def _behind(nodes: Iterable[Node], passed: Passed, to_matmuls: bool) -> set[Node]:
    """Return nodes and those that they are computed from, as far as the next matmuls or to the inputs."""
    seen = set(nodes)
    pending = list(seen)
    while pending:
        node = pending.pop()
        if not (to_matmuls and operator_name(called(node)) in OPERANDS):
            before = {n for n in passed.get(node, node.all_input_nodes) if isinstance(n, Node)} - seen
            seen |= before
            pending += before
    return seen


def _is_matmul(node: Node) -> bool:
    return operator_name(called(node)) in OPERANDS and reduces(node)
