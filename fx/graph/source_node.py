"""Find the source node of a node, which it was in the first export, and the modules around it."""

from __future__ import annotations

import re
from operator import getitem
from pathlib import Path

import torch
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.higher_order_ops import hop_calls, placeholders
from pt2mx.fx.graph.node import is_ours, name_of

#: meta key of the source node's name in subgraphs of conditions and loops, where exports record no source
_KEY = "mx_origin"
_TORCH = Path(torch.__file__).parent


def note_source_nodes(graph: Graph) -> None:
    """Record the name of each node in its meta before passes replace it; the replacement copies the meta."""
    for node in graph.nodes:
        if not node.meta.get("from_node") and _is_original(node):
            node.meta[_KEY] = node.name


def source_name(node: Node) -> str:
    """Return the name of a node's source node in the first export; the node's own name if that is unknown.

    An item of a tuple is named after the tuple, such as `lstm[0]`, because each export creates the items anew.
    """
    if node.target is getitem and isinstance(node.args[0], Node):
        return f"{source_name(node.args[0])}[{node.args[1]}]"
    if _KEY in node.meta:
        return node.meta[_KEY]
    sources = node.meta.get("from_node")
    if not sources:
        return node.name
    source = sources[-1]
    while source.from_node:
        source = source.from_node[-1]
    return source.name


def source_line(node: Node) -> str:
    """Return the innermost line of the model's source, outside of torch, that a node was traced at: `model.py:12`.

    It is "" where the export recorded none, as in a program that was loaded from a file.
    """
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    lines = [f"{Path(path).name}:{line}" for path, line in frames if not Path(path).is_relative_to(_TORCH)]
    return lines[-1] if lines else ""


def inherit_source(node: Node, folded: Node) -> None:
    """Give a node the source of the node `folded`, which was folded into it."""
    for key in ("from_node", _KEY):
        if key in folded.meta:
            node.meta[key] = folded.meta[key]


def nodes_by_source(graph: Graph) -> dict[str, Node]:
    """Map the name of each source node to the last node made from it, which has its value. Nodes that the flow inserts
    (quantization) have no source."""
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and _has_source(node)):
            nodes[source_name(node)] = node
    return nodes


def _has_source(node: Node) -> bool:
    return bool(node.meta.get("from_node")) or _KEY in node.meta or _is_original(node)


def _is_original(node: Node) -> bool:
    """Return whether a node neither calls an operator of pt2mx nor takes an item of such a call."""
    if node.op != "call_function":
        return True
    if node.target is getitem:
        return not any(map(is_ours, node.all_input_nodes))
    return not is_ours(node)


def module_calls(node: Node) -> list[tuple[str, str, str]]:
    """Return (key of the module's call, qualified name, qualified class name) of the modules around a node, outermost
    first. The root's name is ""."""
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (call, plain_name(name), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for call, (name, kind) in stack.items()
    ]


def modules_of(node: Node) -> list[tuple[str, str]]:
    """Return (qualified name, qualified class name) of the modules around a node, outermost first."""
    return [(name, kind) for _, name, kind in module_calls(node)]


def module_name(node: Node) -> str:
    """Return the qualified name of the innermost module around a node."""
    return modules_of(node)[-1][0] if modules_of(node) else ""


def propagate_module_stack(model: GraphModule) -> None:
    """Set the module stack of subgraph nodes that have none: the modules around the call, then the module whose
    parameter the node reads."""
    for call in hop_calls(model):
        stack = call.node.meta.get("nn_module_stack") or {}
        operands = [operand for operand, _ in call.operands()]
        for _, graph in call.graphs:
            owners = {
                placeholder: name_of(operand).rpartition(".")[0]
                for placeholder, operand in zip(placeholders(graph), operands, strict=True)
                if isinstance(operand, Node) and operand.op == "get_attr" and "." in name_of(operand)
            }
            for node in graph.graph.nodes:
                if not node.meta.get("nn_module_stack"):
                    names = dict.fromkeys(owners[n] for n in node.all_input_nodes if n in owners)
                    node.meta["nn_module_stack"] = {**stack, **{name: (name, "") for name in names}}
            propagate_module_stack(graph)


def plain_name(name: str) -> str:
    """Return `encoder.0.attn` for the `L['self'].encoder[0].attn` and `L['self']._modules['encoder'][0].attn` of strict
    export, also after the `_export_root` of a subgraph; the name itself otherwise."""
    name = re.sub(r"^(L\['self'\]\.?)?(_export_root\b\.?)?", "", name)
    name = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", name)
    return ".".join(part for part in name.split(".") if part and part != "_modules")
