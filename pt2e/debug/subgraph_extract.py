"""Extract a part of a graph as a module of its own, and save it with a script that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from pt2mx.pt2e.files.output import whole_file

_SCRIPT = '''"""{title}"""

from pathlib import Path

import torch

import pt2mx
from pt2mx.pt2e.debug.bisect import FORMS
from pt2mx.pt2e.debug.errors import relative_error

torch.manual_seed(0)
subgraph = torch.load(Path(__file__).with_suffix(".pt"), weights_only=False)
first, inputs = subgraph["first"], subgraph["inputs"]
print(first.code)
second = FORMS[subgraph["form"]](first, inputs) if subgraph["form"] else subgraph["second"]
with torch.no_grad():  # a second form that is no module has its outputs in the file
    got = subgraph["outputs"] if second is None else second(*subgraph["second_inputs"])
    print("relative error:", relative_error(got, first(*inputs)))
'''


def extract_subgraph(model: GraphModule, nodes: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """Extract nodes, in their order, as a module.

    Returns:
        The module, whose outputs are the values with users outside of it, or the value of the last node; and the nodes
        of `model` whose values are its inputs.
    """
    inside, graph, copies = set(nodes), Graph(), {}
    operands = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    inputs = [n for n in operands if n.op != "get_attr"]
    for n in inputs:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta.update(n.meta)
    for n in (*(n for n in operands if n.op == "get_attr"), *nodes):
        copies[n] = graph.node_copy(n, copies.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)] or [nodes[-1]]
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(model, graph), inputs


def save_subgraph(path: Path, title: str, content: dict[str, Any]) -> None:
    """Write a script and the `.pt` file that it loads: the modules, or the name of the second form, inputs, outputs."""
    with whole_file(path.with_suffix(".pt")) as file:
        torch.save(content, file)
    with whole_file(path) as file:
        file.write(_SCRIPT.format(title=title.replace('"', "'")).encode())


def smallest_range(count: int, differs: Callable[[int, int], bool]) -> tuple[int, int]:
    """Find a small range within (0, count) that `differs`, given that the whole one does.

    Two binary searches find the end first, and then the start.
    """
    low, end = 0, count  # (0, 0) does not differ, (0, end) does
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (low, middle) if differs(0, middle) else (middle, end)
    start, high = 0, end  # (start, end) differs, (high, end) does not
    while high - start > 1:
        middle = (start + high) // 2
        start, high = (middle, high) if differs(middle, end) else (start, middle)
    return start, end
