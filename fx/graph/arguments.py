"""Arguments of a call in one form."""

import torch
from torch.fx import GraphModule, Node


def make_positional(node: Node, count: int = 0) -> None:
    """Move keyword arguments of an operator's call to their positions, as far as the schema has them there, and write
    out the defaults of the first `count`. A higher-order operator has no schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = [a for a in node.target._schema.arguments if not a.kwarg_only]
    args, kwargs = list(node.args), dict(node.kwargs)
    last = max((i for i, a in enumerate(arguments) if a.name in kwargs), default=-1)
    for argument in arguments[len(args) : max(last + 1, count)]:
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def write_out_arguments(model: GraphModule) -> None:
    """Write out all arguments of pt2mx's operators: a saved graph means the same when a default has become another.

    Tracing (`torch.export.export`, `run_decompositions`) leaves out those that are defaults.
    """
    for node in model.graph.nodes:
        if is_ours(node):
            make_positional(node, len(node.target._schema.arguments))
    model.recompile()


def is_ours(node: Node) -> bool:
    """Whether a node calls an operator of pt2mx."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "pt2mx"
