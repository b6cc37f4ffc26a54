"""Nodes of a graph: what is known of their values while nothing runs, and their arguments in one form.

Values are the `val` meta of an exported graph, or the `example_value` of one that torch.compile traced.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree


def value_of(node: object) -> object:
    """The fake tensor or symbolic size that stands for a node; None where there is none."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None


def dtype_of(node: object) -> torch.dtype | None:
    value = value_of(node)
    return value.dtype if isinstance(value, Tensor) else None


def shape_of(node: object) -> tuple | None:
    """The shape of a node's value. Symbolic sizes are given as text, so that comparing two shapes sets no guard."""
    value = value_of(node)
    return tuple(n if isinstance(n, int) else str(n) for n in value.shape) if isinstance(value, Tensor) else None


def set_value(node: Node) -> None:
    """Give a new node `val` meta, where its inputs have it: its operator run on theirs."""
    if all("val" in n.meta for n in node.all_input_nodes):
        node.meta["val"] = result_of(node)


def result_of(node: Node, given: dict[Node, object] | None = None) -> object:
    """A node's operator run on the values of its inputs, which are all known, or on what is `given` in their place."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: (given or {}).get(n, value_of(n)))
    fakes = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch._subclasses.FakeTensor)]
    with torch.no_grad(), fakes[0].fake_mode if fakes else nullcontext():
        return node.target(*args, **kwargs)


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
