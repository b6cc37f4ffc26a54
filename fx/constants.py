"""Which nodes are constant: computed from parameters and buffers alone."""

import operator

import torch
from torch.fx import GraphModule, Node


def is_constant(node: Node) -> bool:
    """Whether `node` is a parameter or buffer that the graph does not write, or a deterministic function of such alone
    (a weight behind a view, a transpose, a cast, a product of two parameters)."""
    seen: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "get_attr":
            if any(_writes(user, current) for user in current.users):
                return False
        elif not isinstance(current.target, torch._ops.OpOverload) or not current.all_input_nodes:
            return False
        elif torch.Tag.nondeterministic_seeded in current.target.tags or _writes(current):
            return False
        pending.extend(current.all_input_nodes)
    return True


def evaluate(model: GraphModule, node: Node) -> torch.Tensor:
    """The value of a constant node."""
    if node.op == "get_attr":
        return operator.attrgetter(node.target)(model)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: evaluate(model, n))
    return node.target(*args, **kwargs)


def root_name(node: Node) -> str:
    """The qualified name of the first parameter or buffer that a constant node is computed from."""
    while node.op != "get_attr":
        node = node.all_input_nodes[0]
    return node.target


def _writes(node: Node, argument: Node | None = None) -> bool:
    """Whether `node` writes to `argument`, by default to any of its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    written = [value for schema, value in arguments if schema.alias_info and schema.alias_info.is_write]
    return bool(written) if argument is None else argument in written
