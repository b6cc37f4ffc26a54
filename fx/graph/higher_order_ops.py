"""Higher-order operator calls (`cond`, `scan`, `no_grad`, `autocast`, ...) and their subgraphs.

In an exported model a subgraph has no parameters: they are operands of the call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import args_of, attribute_of, name_of, node_arg


class HOPOperands(NamedTuple):
    """The location of some operands in a call: the sequence at `position`, or all arguments from there on (`to_end`).

    fixed: True if every iteration of the subgraph gets the same operands. The state of a loop and the slices of a scan
    are not fixed.
    """

    position: int
    fixed: bool = True
    to_end: bool = False


class HOPSignature(NamedTuple):
    """The arguments of a higher-order operator: the positions of its subgraphs, and the operands in the order of the
    subgraphs' placeholders. The last operands are fixed."""

    subgraphs: tuple[int, ...]
    operands: tuple[HOPOperands, ...]


_SIGNATURES = {
    "cond": HOPSignature((1, 2), (HOPOperands(3),)),
    "while_loop": HOPSignature((0, 1), (HOPOperands(2, fixed=False), HOPOperands(3))),
    "scan": HOPSignature((0,), (HOPOperands(1, fixed=False), HOPOperands(2, fixed=False), HOPOperands(3))),
    "map_impl": HOPSignature((0,), (HOPOperands(1, fixed=False), HOPOperands(2))),
    "associative_scan": HOPSignature((0,), (HOPOperands(1, fixed=False), HOPOperands(1, fixed=False), HOPOperands(2))),
    "hints_wrapper": HOPSignature((0,), (HOPOperands(1),)),
    "wrap_with_set_grad_enabled": HOPSignature((1,), (HOPOperands(2, to_end=True),)),
    "wrap_with_autocast": HOPSignature((4,), (HOPOperands(5, to_end=True),)),
    "tag_activation_checkpoint": HOPSignature((0,), (HOPOperands(1, to_end=True),)),
    "invoke_subgraph": HOPSignature((0,), (HOPOperands(2, to_end=True),)),
}


@dataclass(frozen=True)
class HOPCall:
    """A call of a higher-order operator, and the subgraphs that it may run, with their names in the model."""

    node: Node
    signature: HOPSignature
    graphs: tuple[tuple[str, GraphModule], ...]

    @property
    def is_autocast(self) -> bool:
        """True for autocast: an operator may have another dtype in the subgraph than outside."""
        return self.signature is _SIGNATURES["wrap_with_autocast"]

    def operands(self) -> list[tuple[object, bool]]:
        """Return the operand of each placeholder of the subgraphs, and whether it is fixed."""
        return [(operand, kind.fixed) for kind in self.signature.operands for operand in self._sequence(kind)]

    def append(self, operand: Node) -> None:
        """Add a fixed operand after all others."""
        last = self.signature.operands[-1]
        self._set(last, [*self._sequence(last), operand])

    def remove(self, index: int) -> None:
        """Remove the fixed operand of the placeholder with this index."""
        for kind in self.signature.operands:
            sequence = self._sequence(kind)
            if index < len(sequence):
                self._set(kind, [*sequence[:index], *sequence[index + 1 :]])
                return
            index -= len(sequence)

    def _sequence(self, kind: HOPOperands) -> list[Any]:
        args = args_of(self.node)
        return list(args[kind.position :] if kind.to_end else args[kind.position])

    def _set(self, kind: HOPOperands, operands: list[Any]) -> None:
        args = args_of(self.node)
        if kind.to_end:
            self.node.args = (*args[: kind.position], *operands)
        else:
            sequence = type(args[kind.position])(operands)
            self.node.args = (*args[: kind.position], sequence, *args[kind.position + 1 :])


def hop_calls(model: GraphModule) -> Iterator[HOPCall]:
    """Yield the calls of higher-order operators in a graph."""
    for node in model.graph.nodes:
        # skip overloads first: `isinstance` of the abstract class runs Python code
        if node.op != "call_function" or isinstance(node.target, OpOverload):
            continue
        signature = _SIGNATURES.get(node.target.name()) if isinstance(node.target, HigherOrderOperator) else None
        if signature is not None:
            attributes = [node_arg(node, position) for position in signature.subgraphs]
            yield HOPCall(node, signature, tuple((name_of(n), _graph_module(model, n)) for n in attributes))


def _graph_module(model: GraphModule, attribute: Node) -> GraphModule:
    graph = attribute_of(model, attribute)
    if not isinstance(graph, GraphModule):
        raise TypeError(f"{attribute} reads no graph but a {type(graph).__name__}")
    return graph


def call_groups(model: GraphModule) -> list[tuple[list[GraphModule], list[HOPCall]]]:
    """Return the groups of subgraphs that some call runs together, each with all calls of the group."""
    groups: dict[tuple[int, ...], tuple[list[GraphModule], list[HOPCall]]] = {}
    for call in hop_calls(model):
        graphs = [graph for _, graph in call.graphs]
        groups.setdefault(tuple(map(id, graphs)), (graphs, []))[1].append(call)
    return list(groups.values())


def placeholders(graph: GraphModule) -> list[Node]:
    """Return the placeholders of a graph, in order."""
    return graph.graph.find_nodes(op="placeholder")


def graph_modules(model: GraphModule) -> list[GraphModule]:
    """Return the model's graph and all of its subgraphs, each once, inner ones first."""
    graphs: dict[GraphModule, None] = {}
    for call in hop_calls(model):
        for _, graph in call.graphs:
            graphs.update(dict.fromkeys(graph_modules(graph)))
    return [*graphs, model]


def written_in(model: GraphModule) -> set[Node]:
    """Return the nodes, of the model's graph and of its subgraphs, whose memory the graph writes."""
    return {node for graph in graph_modules(model) for node in written_nodes(graph.graph)}


def captured_operands(model: GraphModule) -> dict[Node, list[object]]:
    """Map each placeholder of a subgraph to its operand in each call.

    An operand that the enclosing subgraph only passes on is replaced by the outermost node.
    """
    operands_of: dict[Node, list[object]] = {}

    def visit(graph: GraphModule, outer: dict[Node, object]) -> None:
        for call in hop_calls(graph):
            operands = [outer.get(o, o) if isinstance(o, Node) else o for o, _ in call.operands()]
            for _, subgraph in call.graphs:
                operand_of = dict(zip(placeholders(subgraph), operands, strict=True))
                for placeholder, operand in operand_of.items():
                    operands_of.setdefault(placeholder, []).append(operand)
                visit(subgraph, operand_of)

    visit(model, {})
    return operands_of


def passed_values(model: GraphModule) -> dict[Node, list[object]]:
    """Map each placeholder of a subgraph to its operands, and each result of a subgraph's call to what the subgraph
    returns."""
    passed = captured_operands(model)
    for caller in graph_modules(model):
        for call in hop_calls(caller):
            for item in call.node.users:
                if item.target is not operator.getitem:
                    continue
                passed[item] = []
                for _, graph in call.graphs:
                    values: Any = graph.graph.output_node().args[0]
                    if not isinstance(values, Node):  # the condition of a loop
                        passed[item] += values[item.args[1] :][:1]
    return passed


def nodes_in_order(model: GraphModule) -> list[Node]:
    """Return the nodes of the model's graph and of its subgraphs in the order of execution.

    The nodes of a subgraph come before its call, and once for each call.
    """
    subgraphs = {call.node: call.graphs for call in hop_calls(model)}
    nodes: list[Node] = []
    for node in model.graph.nodes:
        for _, graph in subgraphs.get(node, ()):
            nodes += nodes_in_order(graph)
        nodes.append(node)
    return nodes


def named_graph_modules(model: GraphModule, path: str = "") -> Iterator[tuple[str, GraphModule]]:
    """Yield (qualified name, graph module) of the model, whose name is "", and of every subgraph that a `get_attr` node
    names, outer ones first. Subgraphs of unknown higher-order operators count too."""
    yield path, model
    attributes = {name_of(node): attribute_of(model, node) for node in model.graph.find_nodes(op="get_attr")}
    for name, attribute in attributes.items():
        if isinstance(attribute, GraphModule):
            yield from named_graph_modules(attribute, f"{path}.{name}" if path else name)
