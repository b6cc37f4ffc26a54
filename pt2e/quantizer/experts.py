"""The experts of a mixture in a graph: the routers that choose them, and the parameters that hold a slice for each.

transformers sorts rows by expert for a grouped matmul, or gathers the weight of each row (`weight[ids]`). The ends of
the groups, and the ids, are computed from the results of a router.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.constants import parameters_behind
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import args_of, called
from pt2mx.pt2e.quantizer.operators import GROUPED, OPERANDS, operator_name, reduces


def routers(graph: Graph) -> set[Node]:
    """Return the matmuls whose results choose the experts of a row."""
    return set().union(*(_deciding(choice) for _, choice, is_weight in _choices(graph) if is_weight))


def expert_parameters(model: GraphModule) -> set[nn.Parameter]:
    """Return the parameters with a slice for each expert along the first dimension, weights and biases."""
    found: set[nn.Parameter] = set()
    for module in graph_modules(model):
        chosen_by = routers(module.graph)
        for parameters, choice, is_weight in _choices(module.graph):
            if is_weight or not chosen_by.isdisjoint(_deciding(choice)):
                found |= parameters
    return found


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


def _deciding(choice: Node) -> set[Node]:
    """Return the matmuls from whose results a node is computed without another matmul between."""
    seen, pending, found = {choice}, [choice], set[Node]()
    while pending:
        node = pending.pop()
        if operator_name(called(node)) not in OPERANDS:
            before = set(node.all_input_nodes) - seen
            seen |= before
            pending += before
        elif reduces(node):
            found.add(node)
    return found
