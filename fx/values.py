"""What is known of a node's value while nothing runs: `val` meta of an exported graph, `example_value` of one that
torch.compile traced."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node


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
        node.meta["val"] = _run(node)


def _run(node: Node) -> object:
    args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
    tensors = [a for a in args if isinstance(a, torch._subclasses.FakeTensor)]
    if not tensors:
        return node.target(*args, **node.kwargs)
    with tensors[0].fake_mode:
        return node.target(*args, **node.kwargs)
