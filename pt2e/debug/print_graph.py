"""`print_graph`: the nodes of a graph with their shapes, formats and places in the model."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.analysis.tables import text_table
from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.module_stack import modules_of
from pt2mx.fx.graph.node import is_ours, named_args, value_of
from pt2mx.fx.graph.subgraphs import named_graph_modules
from pt2mx.pt2e.debug.watched import check_module
from pt2mx.pt2e.observer import MXObserver
from pt2mx.spec import MXSpec

_COLUMNS = ("node", "operator", "shape", "format", "inputs", "module", "source")
_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.uint8: "u8"}


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
    graphs = dict(named_graph_modules(graph))
    wanted = None if around is None else _around(graphs, around, hops)
    for name, one in graphs.items():
        rows = [_row(node, one) for node in one.graph.nodes if wanted is None or node in wanted]
        if rows:
            print(*[f"graph {name}:"] * bool(name), text_table([_COLUMNS, *rows]), sep="\n", file=file)


def _around(graphs: dict[str, GraphModule], name: str, hops: int) -> set[Node]:
    """The nodes of that name or in that module, and their neighbours."""
    nodes = [node for one in graphs.values() for node in one.graph.nodes]
    found = {node for node in nodes if node.name == name} or {node for node in nodes if name in _modules(node)}
    if not found:
        names = [*(node.name for node in nodes), *dict.fromkeys(m for node in nodes for m in _modules(node))]
        raise MXError(f"the graph has no node and no module {name!r}: {nearest(name, names)}")
    for _ in range(hops):
        found |= {near for node in found for near in (*node.all_input_nodes, *node.users)}
    return found


def _modules(node: Node) -> list[str]:
    return [name for name, _ in modules_of(node) if name]


def _row(node: Node, model: GraphModule) -> tuple[str, ...]:
    inputs = ", ".join(one.name for one in node.all_input_nodes)
    return (
        node.name,
        _operator(node),
        _shape(value_of(node)),
        _format(node, model),
        inputs,
        _module(node),
        _source(node),
    )


def _operator(node: Node) -> str:
    if node.op != "call_function":
        return f"{node.op} {node.target}" if node.op in ("get_attr", "call_module") else node.op
    if isinstance(node.target, OpOverload):
        return str(node.target).removesuffix(".default")
    return str(getattr(node.target, "__name__", node.target) if callable(node.target) else node.target)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return ", ".join(_shape(one) for one in value)
    return "" if value is None else str(value)


def _format(node: Node, model: GraphModule) -> str:
    """The spec of what an operator of ours or an observer does to its values or weights."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return str(module.spec) if isinstance(module, MXObserver) else ""
    if not is_ours(node):
        return ""
    named = named_args(node)
    if "elem_dtype_name" not in named or "block_size" not in named:
        return ""
    return str(MXSpec(named["elem_dtype_name"], named["block_size"]))


def _module(node: Node) -> str:
    return _modules(node)[-1] if _modules(node) else ""


def _source(node: Node) -> str:
    """The innermost line of the model's own source that a node was traced at."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{Path(path).name}:{line}" for path, line in frames if "/torch/" not in Path(path).as_posix()]
    return own[-1] if own else ""
