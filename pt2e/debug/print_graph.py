"""`print_graph`: the nodes of a graph with their shapes, formats and places in the model."""

from __future__ import annotations

import difflib
import sys
from typing import TextIO

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.analysis.tables import text_table
from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import named_graph_modules
from pt2mx.pt2e.debug.node_text import (
    format_text,
    module_text,
    modules_around,
    operator_text,
    shape_text,
    source_text,
)
from pt2mx.pt2e.debug.watched import check_module

#: most names in a cell, and in an error
_MOST = 6
_COLUMNS = ("node", "operator", "shape", "format", "inputs", "module", "source")


def print_graph(
    model: GraphModule | ExportedProgram, around: str | None = None, *, hops: int = 2, file: TextIO | None = None
) -> None:
    """Print the nodes of a graph, and of those inside it, a line each: shape, format, inputs, module, source line.

    Args:
        model: an exported, prepared, converted or lowered model.
        around: the name of a node or of a module: its nodes and their neighbours are printed; None: all.
        hops: how many steps along the edges are neighbours.
        file: to print to; None: stdout.

    Raises:
        MXError: for another object, and for a name that no node and no module has.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.ones(2, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> pt2mx.print_graph(pt2mx.convert_pt2e(prepared), around="weight_scale", hops=0)
        node          operator               shape     format  inputs  module  source
        weight_scale  get_attr weight_scale  u8[8, 2]
    """
    graph = check_module(model.module() if isinstance(model, ExportedProgram) else model, "model")
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 0:
        raise MXError(f"hops={hops!r} must be an integer of at least 0")
    file = sys.stdout if file is None else file
    if not hasattr(file, "write"):
        raise MXError(f"file must be open for writing, or None for stdout, not {file!r}")
    graphs = dict(named_graph_modules(graph))
    wanted = None if around is None else _around(graphs, around, hops)
    for name, one in graphs.items():
        rows = [_row(node, one) for node in one.graph.nodes if wanted is None or node in wanted]
        if rows:
            print(*[f"graph {name}:"] * bool(name), text_table([_COLUMNS, *rows]), sep="\n", file=file)


def _around(graphs: dict[str, GraphModule], name: str, hops: int) -> set[Node]:
    """The nodes of that name or in that module, and their neighbours."""
    nodes = [node for one in graphs.values() for node in one.graph.nodes]
    found = {node for node in nodes if node.name == name} or {node for node in nodes if name in modules_around(node)}
    if not found:
        names = [*(node.name for node in nodes), *dict.fromkeys(m for node in nodes for m in modules_around(node))]
        close = difflib.get_close_matches(str(name), names, n=_MOST, cutoff=0)  # a graph has thousands
        raise MXError(f"the graph has no node and no module {name!r}, the closest are {', '.join(close)}")
    for _ in range(hops):
        found |= {near for node in found for near in (*node.all_input_nodes, *node.users)}
    return found


def _names(nodes: list[Node]) -> str:
    more = f" and {len(nodes) - _MOST} more" if len(nodes) > _MOST else ""
    return ", ".join(one.name for one in nodes[:_MOST]) + more


def _row(node: Node, model: GraphModule) -> tuple[str, ...]:
    return (
        node.name,
        operator_text(node),
        shape_text(node),
        format_text(node, model),
        _names(node.all_input_nodes),
        module_text(node),
        source_text(node),
    )
