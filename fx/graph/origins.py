"""Nodes of two forms of a model that stand for the same value: passes and exports note what a node was made from."""

from __future__ import annotations

from operator import getitem

from torch.fx import Graph, Node

from pt2mx.fx.graph.node import is_ours

#: meta key, in the graphs of conditions and loops, where exports note nothing: the name of the node that this one was
_KEY = "mx_origin"


def note_origins(graph: Graph) -> None:
    """Note what each node is, before passes put others in its place: these take its meta."""
    for node in graph.nodes:
        if not node.meta.get("from_node") and _is_original(node):
            node.meta[_KEY] = node.name


def origin(node: Node) -> str:
    """The name that a node, or what it was made from, had in the first export; its own where that is not known. An item
    of a tuple is called by the tuple, `lstm[0]`: exports make items anew."""
    if node.target is getitem and isinstance(node.args[0], Node):
        return f"{origin(node.args[0])}[{node.args[1]}]"
    if _KEY in node.meta:
        return node.meta[_KEY]
    sources = node.meta.get("from_node")
    if not sources:
        return node.name
    source = sources[-1]
    while source.from_node:
        source = source.from_node[-1]
    return source.name


def take_place(node: Node, of: Node) -> None:
    """Note that a node now computes what another did, into which that was folded."""
    for key in ("from_node", _KEY):
        if key in of.meta:
            node.meta[key] = of.meta[key]


def by_origin(graph: Graph) -> dict[str, Node]:
    """Origin -> the node that ends what was made of it: a product may have become several nodes, and its value is the
    last. Nodes that the flow itself inserted (quantization) have none."""
    found: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and _has_origin(node)):
            found[origin(node)] = node
    return found


def _has_origin(node: Node) -> bool:
    return bool(node.meta.get("from_node")) or _KEY in node.meta or _is_original(node)


def _is_original(node: Node) -> bool:
    """True of a node that is neither of ours nor an item of one."""
    return not is_ours(node) and not (node.target is getitem and any(map(is_ours, node.all_input_nodes)))
