"""Cut an exported graph into segments: one for each repeated module, and one for the nodes between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.source_node import module_calls
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.optimize.losses import call_with_batch


@dataclass(frozen=True)
class ModuleBlock:
    """A segment: consecutive nodes of a graph.

    Args:
        name: of the repeated module, such as "encoder.layer.3"; "" between repeated modules.
        nodes: all but constants, placeholders and the output.
        inputs: nodes of other segments, and placeholders, that these nodes read.
        outputs: the nodes that other segments read.
    """

    name: str
    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]

    def copy(self, model: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
        """Return the segment as a graph from `inputs` to a tuple of `outputs`, and the copy of each node.

        The graph shares the parameters of `model`, and leaves out assertions.
        """
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in self.inputs}

        def copy(node: Node) -> Node:
            if node not in copies:  # constants: each segment has its own copy
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in self.nodes:
            if node.users:
                copy(node)
        graph.output(tuple(copies[node] for node in self.outputs))
        segment = GraphModule(model, graph)
        segment.graph.eliminate_dead_code()  # of modules it asks their owner
        segment.recompile()
        return segment, copies


def module_blocks(model: GraphModule) -> list[ModuleBlock]:
    """Return the segments of a graph in execution order. A graph without repeated modules is one segment."""
    constants = constant_nodes(model.graph)
    order = [n for n in model.graph.nodes if n not in constants and n.op not in ("placeholder", "get_attr", "output")]
    blocks = []
    for name, first, last in _spans(order):
        nodes = order[first:last]
        members = set(nodes)
        outputs = [node for node in nodes if not members.issuperset(node.users)]
        inputs: dict[Node, None] = {}
        for node in nodes:
            if node.users:
                inputs.update(dict.fromkeys(node.all_input_nodes))
        inside = members | constants
        blocks.append(ModuleBlock(name, nodes, [node for node in inputs if node not in inside], outputs))
    return blocks


def _spans(order: list[Node]) -> list[tuple[str, int, int]]:
    """Return (name, first, end) of each segment.

    A repeated module spans its first to its last node. Overlapping spans are merged, and each gap is a span too.
    """
    calls: dict[str, tuple[str, int, int]] = {}
    repeated = _repeated(order)
    for i, node in enumerate(order):
        for call, name, _ in module_calls(node):
            if name in repeated:
                _, first, _ = calls.get(call, (name, i, i))
                calls[call] = name, first, i + 1
                break  # the outermost
    spans: list[tuple[str, int, int]] = []
    end = 0
    for name, first, last in sorted(calls.values(), key=lambda span: span[1:]):
        if first < end:
            before, begin, _ = spans.pop()
            names = dict.fromkeys((*before.split(", "), name))
            spans.append((", ".join(names), begin, max(end, last)))
        else:
            if first > end:
                spans.append(("", end, first))
            spans.append((name, first, last))
        end = max(end, last)
    if end < len(order):
        spans.append(("", end, len(order)))
    return spans


def _repeated(order: list[Node]) -> set[str]:
    """Return the names of numbered modules that contain modules and have siblings of their class."""
    kinds: dict[tuple[str, str], set[str]] = {}
    for node in order:
        for _, name, kind in module_calls(node)[:-1]:
            parent, _, number = name.rpartition(".")
            if number.isdigit():
                kinds.setdefault((parent, kind), set()).add(name)
    return set().union(*(names for names in kinds.values() if len(names) > 1))


class _Inputs(Exception):
    """The inputs of a call; it ends the call as soon as they are known."""


def _end(*inputs: Any) -> None:
    raise _Inputs(*inputs)


def placeholder_values(model: GraphModule, batches: Sequence[object]) -> list[dict[Node, Any]]:
    """Return the value of each placeholder for each batch."""
    copied = copy_sharing_tensors(model)
    placeholders = copied.graph.find_nodes(op="placeholder")
    with copied.graph.inserting_after(placeholders[-1]):
        copied.graph.call_function(_end, tuple(placeholders))
    copied.recompile()
    names, values = model.graph.find_nodes(op="placeholder"), []
    for batch in batches:
        try:
            call_with_batch(copied, batch)
        except _Inputs as inputs:
            values.append(dict(zip(names, inputs.args, strict=True)))
    return values
