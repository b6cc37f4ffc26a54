"""What is known of a node's value while nothing runs: `val` meta of an exported graph, `example_value` of one that
torch.compile traced."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.fx import Node
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
