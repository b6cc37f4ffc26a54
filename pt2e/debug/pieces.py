"""Pieces of a graph as modules of their own, and the files that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from pt2mx.pt2e.output import whole_file

_SCRIPT = '''"""{title}"""

from pathlib import Path

import torch

import pt2mx
from pt2mx.pt2e.debug.bisect import FORMS
from pt2mx.pt2e.debug.differences import relative_error

torch.manual_seed(0)
piece = torch.load(Path(__file__).with_suffix(".pt"), weights_only=False)
first, inputs = piece["first"], piece["inputs"]
print(first.code)
second = FORMS[piece["form"]](first, inputs) if piece["form"] else piece["second"]
with torch.no_grad():  # of a second form that is not here there are the outputs
    got = piece["outputs"] if second is None else second(*piece["second_inputs"])
    print("relative error:", relative_error(got, first(*inputs)))
'''


def piece_of(model: GraphModule, nodes: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """The nodes, in their order, as a module, and the nodes of `model` whose values are its inputs. Its outputs are the
    values that others read, or that of the last node."""
    inside, graph, copies = set(nodes), Graph(), {}
    needed = [one for node in nodes for one in node.all_input_nodes if one not in inside]
    needed = list(dict.fromkeys(needed))
    inputs = [one for one in needed if one.op != "get_attr"]
    for one in inputs:
        copies[one] = graph.placeholder(one.name)
        copies[one].meta.update(one.meta)
    for one in (*(one for one in needed if one.op == "get_attr"), *nodes):
        copies[one] = graph.node_copy(one, copies.__getitem__)
    read = [node for node in nodes if any(user not in inside for user in node.users)] or [nodes[-1]]
    graph.output(tuple(copies[node] for node in read))
    return GraphModule(model, graph), inputs


def save_piece(path: Path, title: str, piece: dict[str, Any]) -> None:
    """Write a script, and beside it what it loads: the two modules or the name of the second form, inputs, outputs."""
    with whole_file(path.with_suffix(".pt")) as file:
        torch.save(piece, file)
    with whole_file(path) as file:
        file.write(_SCRIPT.format(title=title.replace('"', "'")).encode())


def smallest(count: int, differs: Callable[[int, int], bool]) -> tuple[int, int]:
    """The ends of a small range within 0 to `count` that `differs`, which the whole one does: as short as two binary
    searches find, its end first."""
    first, last = 0, count
    low = 0  # nothing differs
    while last - low > 1:
        middle = (low + last) // 2
        low, last = (low, middle) if differs(0, middle) else (middle, last)
    high = last
    while high - first > 1:
        middle = (first + high) // 2
        first, high = (middle, high) if differs(middle, last) else (first, middle)
    return first, last
