"""Which nodes share memory that the graph writes: `x[:, 0] = 5` exports as a write to a view of x."""

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree


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
    """The storage roots that an operator of the graph writes to, or one of a graph inside it; a parameter or buffer by
    its qualified name too, since another `get_attr` may read it."""
    roots: set[Node | str] = set()
    for node in graph.nodes:
        written = [value for value, info in _arguments(node) if info is not None and info.is_write]
        for value in [*written, *_written_inside(node)]:
            if isinstance(value, Node):
                root = storage_root(value)
                roots |= {root, root.target} if root.op == "get_attr" else {root}
    return roots


def is_written(node: Node, roots: set[Node | str]) -> bool:
    """Whether the memory that `node` shows is among the written roots."""
    root = storage_root(node)
    return root in roots or (root.op == "get_attr" and root.target in roots)


def _written_inside(node: Node) -> Iterator[object]:
    """The operands of a higher-order operator that a graph which it calls writes. The last arguments are those that
    stand behind the placeholders, in order."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return
    arguments = pytree.tree_leaves(node.args)
    names = [a.target for a in arguments if isinstance(a, Node) and a.op == "get_attr"]
    for inner in (operator.attrgetter(name)(node.graph.owning_module) for name in names):
        if isinstance(inner, GraphModule):
            roots = written_roots(inner.graph)
            placeholders = inner.graph.find_nodes(op="placeholder")
            for placeholder, operand in zip(reversed(placeholders), reversed(arguments), strict=False):
                if placeholder in roots:
                    yield operand


def _arguments(node: Node) -> list[tuple[object, object]]:
    """(value, alias information) of the positional arguments of an operator."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [(v, s.alias_info) for s, v in zip(node.target._schema.arguments, node.args, strict=False)]
