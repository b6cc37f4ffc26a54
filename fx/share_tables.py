"""Tables that a decomposed graph computes again for each weight: keep the first of each."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from pt2mx.fx.graph.higher_order_ops import graph_modules


def share_tables(program: ExportedProgram) -> ExportedProgram:
    """Replace equal values that a graph computes from no tensor by the first of them.

    Each weight decodes by a table of its own, the values of codes and the shifts of packed ones: about half of the
    nodes of a graph with FP4 weights. Changes `program` and returns it.
    """
    for model in graph_modules(program.graph_module):
        _share(model.graph)
        model.recompile()
    return program


def _share(graph: Graph) -> None:
    returned = set(graph.output_node().all_input_nodes)  # the program's signature has their names
    tables: set[Node] = set()
    first: dict[str, Node] = {}
    for node in list(graph.nodes):
        if not _is_deterministic(node) or not tables.issuperset(node.all_input_nodes):
            continue
        kept = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if kept is node or node in returned:
            tables.add(node)
        else:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _is_deterministic(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags
