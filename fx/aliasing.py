"""Which nodes share memory that the graph writes: `x[:, 0] = 5` exports as a write to a view of x."""

import operator

import torch
from torch.fx import Graph, Node


def storage_root(node: Node) -> Node:
    """The node whose memory `node` shows: through views, in-place operators and the items of several views."""
    while True:
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            node = node.args[0]
            continue
        aliased = [value for value, info in _arguments(node) if info is not None and isinstance(value, Node)]
        if not aliased:
            return node
        node = aliased[0]


def written_roots(graph: Graph) -> set[Node | str]:
    """The storage roots that an operator of the graph writes to; a parameter or buffer by its qualified name too, since
    another `get_attr` may read it."""
    roots: set[Node | str] = set()
    for node in graph.nodes:
        for value, info in _arguments(node):
            if info is not None and info.is_write and isinstance(value, Node):
                root = storage_root(value)
                roots |= {root, root.target} if root.op == "get_attr" else {root}
    return roots


def is_written(node: Node, roots: set[Node | str]) -> bool:
    """Whether the memory that `node` shows is among the written roots."""
    root = storage_root(node)
    return root in roots or (root.op == "get_attr" and root.target in roots)


def _arguments(node: Node) -> list[tuple[object, object]]:
    """(value, alias information) of the positional arguments of an operator."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [(v, s.alias_info) for s, v in zip(node.target._schema.arguments, node.args, strict=False)]
