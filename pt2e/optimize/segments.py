"""An exported graph, cut into blocks that run one after the other: the repeated modules, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.source_node import module_calls
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.optimize.losses import called_with


@dataclass(frozen=True)
class Block:
    """Nodes that follow each other in a graph.

    Args:
        name: the repeated modules they are of, such as "encoder.layer.3"; "" between such.
        nodes: all but constants, placeholders and the output.
        inputs: nodes of other blocks, and placeholders, that these read.
        outputs: those of them that others read.
    """

    name: str
    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]

    def copy(self, model: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
        """The block by itself: a graph of `inputs` that gives a tuple of `outputs`, and the copy of each node. It
        shares the parameters of `model`, from which it is cut, and leaves out what asserts."""
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in self.inputs}

        def copy(node: Node) -> Node:
            if node not in copies:  # a constant, which each block has for itself
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in self.nodes:
            if node.users:
                copy(node)
        graph.output(tuple(copies[node] for node in self.outputs))
        graph.eliminate_dead_code()
        return GraphModule(model, graph), copies


def cut_blocks(model: GraphModule) -> list[Block]:
    """The blocks of a graph, in the order of execution. A graph without repeated modules is one block."""
    constants = constant_nodes(model.graph)
    order = [n for n in model.graph.nodes if n not in constants and n.op not in ("placeholder", "get_attr", "output")]
    found = []
    for name, first, last in _spans(order):
        nodes = order[first:last]
        inside = set(nodes)
        read = dict.fromkeys(n for node in nodes if node.users for n in node.all_input_nodes)
        inputs = [n for n in read if n not in inside and n not in constants]
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        found.append(Block(name, nodes, inputs, outputs))
    return found


def _spans(order: list[Node]) -> list[tuple[str, int, int]]:
    """(name, first, end) of the blocks. A repeated module reaches from its first node to its last; those that overlap
    are one block, and so is what lies between two."""
    reach: dict[str, tuple[str, int, int]] = {}
    repeated = _repeated(order)
    for i, node in enumerate(order):
        for call, name, _ in module_calls(node):
            if name in repeated:
                _, first, _ = reach.get(call, (name, i, i))
                reach[call] = name, first, i + 1
                break  # the outermost
    spans: list[tuple[str, int, int]] = []
    end = 0
    for name, first, last in sorted(reach.values(), key=lambda span: span[1:]):
        if first < end:
            before, begin, _ = spans.pop()
            names = dict.fromkeys((*before.split(", "), name))
            spans.append((", ".join(names), begin, max(end, last)))
        else:
            spans += [("", end, first)] if first > end else []
            spans.append((name, first, last))
        end = max(end, last)
    return [*spans, ("", end, len(order))] if end < len(order) else spans


def _repeated(order: list[Node]) -> set[str]:
    """The names of numbered modules, with modules inside, that have others of their class beside them."""
    kinds: dict[tuple[str, str], set[str]] = {}
    for node in order:
        for _, name, kind in module_calls(node)[:-1]:
            parent, _, number = name.rpartition(".")
            if number.isdigit():
                kinds.setdefault((parent, kind), set()).add(name)
    return {name for names in kinds.values() if len(names) > 1 for name in names}


class _Reached(Exception):
    """Ends a call of a graph once its inputs are known."""


class _Inputs(nn.Module):
    """Keeps what it is called with, and ends the call."""

    values: tuple[Any, ...] = ()

    def forward(self, *values: Any) -> None:
        self.values = values
        raise _Reached


def placeholder_values(model: GraphModule, batch: object) -> dict[Node, Any]:
    """The value of each placeholder of a graph for a batch."""
    placeholders = model.graph.find_nodes(op="placeholder")
    copied, inputs = copy_sharing_tensors(model), _Inputs()
    copied.add_submodule("inputs_of_batch", inputs)
    ends = copied.graph.find_nodes(op="placeholder")
    with copied.graph.inserting_after(ends[-1]):
        copied.graph.call_module("inputs_of_batch", tuple(ends))
    copied.recompile()
    try:
        called_with(copied, batch)
    except _Reached:
        pass
    return dict(zip(placeholders, inputs.values, strict=True))
