"""Walks over a model's graph and the graphs inside it, which higher-order operators call."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.attributes import attribute_of, name_of
from pt2mx.fx.graph.calls import calls, placeholders


def graph_modules(model: GraphModule) -> list[GraphModule]:
    """The model's graph and all inside it, each once, the inner ones first."""
    found: dict[GraphModule, None] = {}
    for call in calls(model):
        for _, graph in call.graphs:
            found.update(dict.fromkeys(graph_modules(graph)))
    return [*found, model]


def written_in(model: GraphModule) -> set[Node]:
    """The nodes of the model's graph, and of those inside it, that show memory which the graph writes."""
    return {node for graph in graph_modules(model) for node in written_nodes(graph.graph)}


def captured_operands(model: GraphModule) -> dict[Node, list[object]]:
    """Placeholder of a graph inside -> what it stands for in the graphs around, for each call; the outermost node that
    is passed on as it is."""
    found: dict[Node, list[object]] = {}

    def visit(graph: GraphModule, own: dict[Node, object]) -> None:
        for call in calls(graph):
            operands = [own.get(o, o) if isinstance(o, Node) else o for o, _ in call.operands()]
            for _, inner in call.graphs:
                standing = dict(zip(placeholders(inner), operands, strict=True))
                for placeholder, operand in standing.items():
                    found.setdefault(placeholder, []).append(operand)
                visit(inner, standing)

    visit(model, {})
    return found


def nodes_in_order(model: GraphModule) -> Iterator[Node]:
    """The nodes of the model's graph and of those inside it in the order of execution: what a call may run comes before
    the call. Of a graph that is called again they come twice."""
    called = {call.node: call.graphs for call in calls(model)}
    for node in model.graph.nodes:
        for _, graph in called.get(node, ()):
            yield from nodes_in_order(graph)
        yield node


def named_graph_modules(model: GraphModule, path: str = "") -> Iterator[tuple[str, GraphModule]]:
    """(qualified name, graph module) of the model, whose name is "", and of all that `get_attr` nodes name, those that
    other higher-order operators call too, the outer ones first."""
    yield path, model
    found = {name_of(node): attribute_of(model, node) for node in model.graph.find_nodes(op="get_attr")}
    for name, inner in found.items():
        if isinstance(inner, GraphModule):
            yield from named_graph_modules(inner, f"{path}.{name}" if path else name)
