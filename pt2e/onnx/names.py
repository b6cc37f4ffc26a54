"""Names in a graph: those that are taken, and new ones."""

from __future__ import annotations

from onnx import GraphProto

from pt2mx.pt2e.onnx.nodes import graphs_in


def names_in(graph: GraphProto) -> set[str]:
    """The names of the nodes and tensors of a graph, and of those inside."""
    taken: set[str] = set()
    for each in graphs_in(graph):
        taken |= {value.name for value in (*each.input, *each.output, *each.initializer)}
        taken |= {name for node in each.node for name in (node.name, *node.input, *node.output)}
    return taken


def unused(name: str, taken: set[str]) -> str:
    """`name`, or the first of `name_1`, ... that is not taken; it is taken then."""
    candidates = (name if i == 0 else f"{name}_{i}" for i in range(len(taken) + 1))
    found = next(candidate for candidate in candidates if candidate not in taken)
    taken.add(found)
    return found
