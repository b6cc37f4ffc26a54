"""Equivalent transformations of matmuls, shared by smoothing and rotation: both operands change, the result does not.

The caller changes the weight at once. A new node of the graph changes the input, one node for all matmuls that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.higher_order_ops import captured_operands, written_in
from pt2mx.fx.graph.node import set_value
from pt2mx.fx.graph.qdq import PROVENANCE_KEYS
from pt2mx.pt2e.optimize.matmul_views import Matmul, columns_are_last
from pt2mx.pt2e.optimize.observers import MXHessianObserver
from pt2mx.pt2e.optimize.targets import WeightTarget, has_no_other_users, reason_not_rounded

#: with at least so many bits per element, rounding loses little, and a transformation gains nothing
BITS = 8

#: consumer of a weight -> the observer of its input
InputObservers = dict[Node, MXHessianObserver]


def insert_operator(consumers: Sequence[tuple[Node, int]], operator: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Insert a call of `operator` before the first consumer, and make all consumers read the result.

    Each consumer comes with the position of the argument to replace; it may still read the source elsewhere, as a bias.
    """
    first = min(consumer for consumer, _ in consumers)  # in execution order
    with first.graph.inserting_before(first):
        new = first.graph.call_function(operator, args)
    new.meta.update({key: first.meta[key] for key in PROVENANCE_KEYS if key in first.meta})
    set_value(new)
    for consumer, position in consumers:
        consumer.update_arg(position, new)


def fixed_nodes(model: GraphModule) -> set[Node]:
    """Return the nodes that no transformation may touch.

    These are nodes in memory that the graph writes, and subgraph placeholders whose operand differs between calls:
    changing a subgraph for one weight would also change the matmuls of another.
    """
    fixed = set(written_in(model))
    for node, operands in captured_operands(model).items():
        if any(operand is not operands[0] for operand in operands):
            fixed.add(node)
    return fixed


def transformable_matmuls(target: WeightTarget, fixed: set[Node]) -> list[Matmul]:
    """Return the matmuls of a weight if the columns of all their operands can be transformed, else an empty list.

    This requires that the columns are the last dimension of each input, and that nothing else uses the weight.
    """
    if not has_no_other_users(target) or reason_not_rounded(target):
        return []
    matmuls: list[Matmul] = []
    for consumer in target.consumers:
        matmul = consumer.matmul
        if matmul is None or not columns_are_last(matmul) or matmul.source in fixed or consumer.weight in fixed:
            return []
        if matmuls and matmul.view.axis != matmuls[0].view.axis:
            return []
        matmuls.append(matmul)
    return matmuls
