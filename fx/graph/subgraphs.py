"""Graphs inside graphs: what higher-order operators (cond, while_loop, scan, no_grad, autocast, checkpoint) call.

Export gives such a graph no parameters of its own: they are operands of the call. Which placeholders stand for constant
tensors is marked, so that passes can tell a weight there too, and weights that are quantized inside are lifted out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.constants import CONSTANT_KEY, constant_nodes


class _Operands(NamedTuple):
    """Operands of a call: a sequence at `position`, or, where `rest`, all arguments from there on. `fixed`: the graphs
    get them as they are, each time; not a loop's state, or a slice."""

    position: int
    fixed: bool = True
    rest: bool = False


#: higher-order operator -> positions of the graphs, and operands in the order of their placeholders; the last are fixed
_CALLS: dict[str, tuple[tuple[int, ...], tuple[_Operands, ...]]] = {
    "cond": ((1, 2), (_Operands(3),)),
    "while_loop": ((0, 1), (_Operands(2, fixed=False), _Operands(3))),
    "scan": ((0,), (_Operands(1, fixed=False), _Operands(2, fixed=False), _Operands(3))),
    "map_impl": ((0,), (_Operands(1, fixed=False), _Operands(2))),
    "associative_scan": ((0,), (_Operands(1, fixed=False), _Operands(1, fixed=False), _Operands(2))),
    "hints_wrapper": ((0,), (_Operands(1),)),
    "wrap_with_set_grad_enabled": ((1,), (_Operands(2, rest=True),)),
    "wrap_with_autocast": ((4,), (_Operands(5, rest=True),)),
    "tag_activation_checkpoint": ((0,), (_Operands(1, rest=True),)),
    "invoke_subgraph": ((0,), (_Operands(2, rest=True),)),
}


@dataclass(frozen=True)
class Call:
    """A call of a higher-order operator and the graphs that it may run, with their names in the model."""

    node: Node
    graphs: tuple[tuple[str, GraphModule], ...]

    def operands(self) -> list[tuple[object, bool]]:
        """For each placeholder of the graphs its operand, and whether that is fixed."""
        return [(operand, kind.fixed) for kind in self._kinds() for operand in self._sequence(kind)]

    def append(self, operand: Node) -> None:
        self._set(self._kinds()[-1], [*self._sequence(self._kinds()[-1]), operand])

    def remove(self, place: int) -> None:
        """Remove the operand of that placeholder, a fixed one."""
        for kind in self._kinds():
            sequence = self._sequence(kind)
            if place < len(sequence):
                self._set(kind, [*sequence[:place], *sequence[place + 1 :]])
                return
            place -= len(sequence)

    def _kinds(self) -> tuple[_Operands, ...]:
        return _CALLS[self.node.target.name()][1]

    def _sequence(self, kind: _Operands) -> list:
        args = self.node.args
        return list(args[kind.position :] if kind.rest else args[kind.position])

    def _set(self, kind: _Operands, operands: list) -> None:
        args = self.node.args
        if kind.rest:
            self.node.args = (*args[: kind.position], *operands)
        else:
            sequence = type(args[kind.position])(operands)
            self.node.args = (*args[: kind.position], sequence, *args[kind.position + 1 :])


def calls(model: GraphModule) -> Iterator[Call]:
    """The calls of higher-order operators in a graph."""
    for node in model.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _CALLS:
            names = [node.args[position].target for position in _CALLS[node.target.name()][0]]
            yield Call(node, tuple((name, model.get_submodule(name)) for name in names))


def graph_modules(model: GraphModule) -> list[GraphModule]:
    """The model's graph and all inside it, each once, the inner ones first."""
    found: dict[GraphModule, None] = {}
    for call in calls(model):
        for _, graph in call.graphs:
            found.update(dict.fromkeys(graph_modules(graph)))
    return [*found, model]


def captured_operands(model: GraphModule) -> dict[Node, list[object]]:
    """Placeholder of a graph inside -> what it stands for in the graphs around, for each call; the outermost node that
    is passed on as it is."""
    found: dict[Node, list[object]] = {}

    def visit(graph: GraphModule, own: dict[Node, object]) -> None:
        for call in calls(graph):
            operands = [own.get(operand, operand) for operand, _ in call.operands()]
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
    for name in dict.fromkeys(node.target for node in model.graph.find_nodes(op="get_attr")):
        inner = operator.attrgetter(name)(model)
        if isinstance(inner, GraphModule):
            yield from named_graph_modules(inner, f"{path}.{name}" if path else name)


def propagate_module_stack(model: GraphModule) -> None:
    """Give the nodes inside that do not know their module one: that of the parameter they read, inside the place of the
    call."""
    for call in calls(model):
        stack = call.node.meta.get("nn_module_stack") or {}
        operands = [operand for operand, _ in call.operands()]
        for _, graph in call.graphs:
            owners = {
                placeholder: operand.target.rpartition(".")[0]
                for placeholder, operand in zip(placeholders(graph), operands, strict=True)
                if isinstance(operand, Node) and operand.op == "get_attr" and "." in operand.target
            }
            for node in graph.graph.nodes:
                if not node.meta.get("nn_module_stack"):
                    names = dict.fromkeys(owners[n] for n in node.all_input_nodes if n in owners)
                    node.meta["nn_module_stack"] = {**stack, **{name: (name, "") for name in names}}
            propagate_module_stack(graph)


def mark_constants(model: GraphModule) -> None:
    """Mark the placeholders inside that stand for constant tensors in every call."""
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


def call_groups(model: GraphModule) -> list[tuple[list[GraphModule], list[Call]]]:
    """Graphs that share their operands, and the calls of them."""
    groups: dict[tuple[int, ...], tuple[list[GraphModule], list[Call]]] = {}
    for call in calls(model):
        graphs = [graph for _, graph in call.graphs]
        groups.setdefault(tuple(map(id, graphs)), (graphs, []))[1].append(call)
    return list(groups.values())


def placeholders(graph: GraphModule) -> list[Node]:
    return graph.graph.find_nodes(op="placeholder")
