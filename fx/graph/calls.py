"""Calls of higher-order operators (cond, while_loop, scan, no_grad, autocast, checkpoint) and of the graphs inside.

Export gives a graph inside no parameters of its own: they are operands of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.attributes import attribute_of, name_of
from pt2mx.fx.graph.node import args_of, node_arg


class _Operands(NamedTuple):
    """Operands of a call: a sequence at `position`, or, where `rest`, all arguments from there on. `fixed`: the graphs
    get them as they are, each time; not a loop's state, or a slice."""

    position: int
    fixed: bool = True
    rest: bool = False


class _Form(NamedTuple):
    """The arguments of a higher-order operator: positions of the graphs, and operands in the order of their
    placeholders; the last are fixed."""

    graphs: tuple[int, ...]
    operands: tuple[_Operands, ...]


_FORMS = {
    "cond": _Form((1, 2), (_Operands(3),)),
    "while_loop": _Form((0, 1), (_Operands(2, fixed=False), _Operands(3))),
    "scan": _Form((0,), (_Operands(1, fixed=False), _Operands(2, fixed=False), _Operands(3))),
    "map_impl": _Form((0,), (_Operands(1, fixed=False), _Operands(2))),
    "associative_scan": _Form((0,), (_Operands(1, fixed=False), _Operands(1, fixed=False), _Operands(2))),
    "hints_wrapper": _Form((0,), (_Operands(1),)),
    "wrap_with_set_grad_enabled": _Form((1,), (_Operands(2, rest=True),)),
    "wrap_with_autocast": _Form((4,), (_Operands(5, rest=True),)),
    "tag_activation_checkpoint": _Form((0,), (_Operands(1, rest=True),)),
    "invoke_subgraph": _Form((0,), (_Operands(2, rest=True),)),
}


@dataclass(frozen=True)
class Call:
    """A call of a higher-order operator and the graphs that it may run, with their names in the model."""

    node: Node
    form: _Form
    graphs: tuple[tuple[str, GraphModule], ...]

    @property
    def is_autocast(self) -> bool:
        """True if operators inside may have another dtype than outside."""
        return self.form is _FORMS["wrap_with_autocast"]

    def operands(self) -> list[tuple[object, bool]]:
        """For each placeholder of the graphs its operand, and whether that is fixed."""
        return [(operand, kind.fixed) for kind in self.form.operands for operand in self._sequence(kind)]

    def append(self, operand: Node) -> None:
        """Add an operand behind all others, a fixed one."""
        last = self.form.operands[-1]
        self._set(last, [*self._sequence(last), operand])

    def remove(self, place: int) -> None:
        """Remove the operand of that placeholder, a fixed one."""
        for kind in self.form.operands:
            sequence = self._sequence(kind)
            if place < len(sequence):
                self._set(kind, [*sequence[:place], *sequence[place + 1 :]])
                return
            place -= len(sequence)

    def _sequence(self, kind: _Operands) -> list[Any]:
        args = args_of(self.node)
        return list(args[kind.position :] if kind.rest else args[kind.position])

    def _set(self, kind: _Operands, operands: list[Any]) -> None:
        args = args_of(self.node)
        if kind.rest:
            self.node.args = (*args[: kind.position], *operands)
        else:
            sequence = type(args[kind.position])(operands)
            self.node.args = (*args[: kind.position], sequence, *args[kind.position + 1 :])


def calls(model: GraphModule) -> Iterator[Call]:
    """The calls of higher-order operators in a graph."""
    for node in model.graph.nodes:
        form = _FORMS.get(node.target.name()) if isinstance(node.target, HigherOrderOperator) else None
        if form is not None:
            readers = [node_arg(node, position) for position in form.graphs]
            yield Call(node, form, tuple((name_of(reader), _graph_module(model, reader)) for reader in readers))


def _graph_module(model: GraphModule, reader: Node) -> GraphModule:
    graph = attribute_of(model, reader)
    if not isinstance(graph, GraphModule):
        raise TypeError(f"{reader} reads no graph but a {type(graph).__name__}")
    return graph


def call_groups(model: GraphModule) -> list[tuple[list[GraphModule], list[Call]]]:
    """Graphs that share their operands, and the calls of them."""
    groups: dict[tuple[int, ...], tuple[list[GraphModule], list[Call]]] = {}
    for call in calls(model):
        graphs = [graph for _, graph in call.graphs]
        groups.setdefault(tuple(map(id, graphs)), (graphs, []))[1].append(call)
    return list(groups.values())


def placeholders(graph: GraphModule) -> list[Node]:
    """The placeholders of a graph, in order."""
    return graph.graph.find_nodes(op="placeholder")
