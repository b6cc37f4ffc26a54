"""`print_graph`: print the nodes of a graph with their shapes, formats and modules."""

from __future__ import annotations

import difflib
import sys
from typing import TextIO

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.analysis.tables import text_table
from pt2mx.errors import MXError, check_integer, listed
from pt2mx.fx.graph.higher_order_ops import named_graph_modules
from pt2mx.fx.graph.node import called, is_ours, named_args, value_of
from pt2mx.fx.graph.source_node import module_name, modules_of, source_line
from pt2mx.pt2e.debug.interpreter import check_module
from pt2mx.pt2e.observe.observer import observer_of
from pt2mx.spec import MXSpec

#: the most names in a cell, and in an error
_SHOWN = 6
_COLUMNS = ("node", "operator", "shape", "format", "inputs", "module", "source")
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.uint8: "u8"}


def print_graph(
    model: GraphModule | ExportedProgram, around: str | None = None, *, hops: int = 2, file: TextIO | None = None
) -> None:
    """Print the nodes of a graph and its subgraphs, a line each: shape, format, inputs, module, source line.

    Args:
        model: an exported, prepared, converted or lowered model.
        around: the name of a node or a module; only its nodes and their neighbours are printed. None prints all.
        hops: the number of edges to the farthest neighbour.
        file: the file to print to; None for stdout.

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
    graph = check_module(model, "model")
    check_integer("hops", hops, 0)
    file = sys.stdout if file is None else file
    if not hasattr(file, "write"):
        raise MXError(f"file must be open for writing, or None for stdout, not {file!r}")
    graphs = dict(named_graph_modules(graph))
    nodes = None if around is None else _around(graphs, around, hops)
    for name, one in graphs.items():
        rows = [_row(node) for node in one.graph.nodes if nodes is None or node in nodes]
        if rows and name:
            print(f"graph {name}:", file=file)
        if rows:
            print(text_table([_COLUMNS, *rows]), file=file)


def _around(graphs: dict[str, GraphModule], name: str, hops: int) -> set[Node]:
    """Return the nodes with that name or in that module, and their neighbours."""
    nodes = [node for one in graphs.values() for node in one.graph.nodes]
    near = {node for node in nodes if node.name == name}
    if not near:
        near = {node for node in nodes if name in _modules_around(node)}
    if not near:
        names = dict.fromkeys(node.name for node in nodes)
        for node in nodes:
            names |= dict.fromkeys(_modules_around(node))
        close = difflib.get_close_matches(str(name), names, n=_SHOWN, cutoff=0)  # a graph has thousands
        raise MXError(f"the graph has no node and no module {name!r}, the closest are {', '.join(close)}")
    for _ in range(hops):
        for node in list(near):
            near.update(node.all_input_nodes, node.users)
    return near


def _row(node: Node) -> tuple[str, ...]:
    return (
        node.name,
        operator_text(node),
        shape_text(node),
        format_text(node),
        listed([one.name for one in node.all_input_nodes], _SHOWN),
        module_name(node),
        source_line(node),
    )


def operator_text(node: Node) -> str:
    """Return the operator that a node calls, or the name of its attribute or module."""
    operator = called(node)
    if isinstance(operator, OpOverload):
        return str(operator).removesuffix(".default")
    if node.op in ("get_attr", "call_module"):
        return f"{node.op} {node.target}"
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else node.op


def shape_text(node: Node) -> str:
    """Return the dtype and shape of a node's value, such as `f32[2, 64]`."""
    return _shape(value_of(node))


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return ", ".join(map(_shape, value))
    return "" if value is None else str(value)


def format_text(node: Node) -> str:
    """Return the spec that an operator of ours or an observer quantizes to or from."""
    if (observer := observer_of(node)) is not None:
        return str(observer.spec)
    if not is_ours(node):
        return ""
    named = named_args(node)
    if "elem_dtype_name" not in named or "block_size" not in named:
        return ""
    return str(MXSpec(named["elem_dtype_name"], named["block_size"]))


def _modules_around(node: Node) -> list[str]:
    """Return the names of the modules around a node, outermost first, without the root."""
    return [name for name, _ in modules_of(node) if name]
