"""Transposed weights of a graph, made codes along another dimension, as a converted model has them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.attributes import tensor_of
from pt2mx.fx.graph.node import Dequantize, args_of, set_value
from pt2mx.fx.graph.tensors import replace_tensor


def fold_transposes(model: GraphModule) -> bool:
    """Decode packed weights that are read transposed from transposed codes. Changes `model`.

    Returns:
        True where there were any.
    """
    folded = False
    for node, call in list(Dequantize.calls_in(model.graph)):
        swapped = _transposed(next(iter(node.users)))
        if call.codes.op != "get_attr" or swapped is None or any(_transposed(user) != swapped for user in node.users):
            continue
        for held in (call.codes, call.scale):
            value = tensor_of(model, held)
            replace_tensor(model, value, value.transpose(*swapped).contiguous())
            held.meta["val"] = held.meta["val"].transpose(*swapped).contiguous()
        (axis,) = set(swapped) - {call.axis} if call.axis in swapped else {call.axis}
        node.update_arg(5, axis)
        set_value(node)
        for user in list(node.users):
            user.replace_all_uses_with(node)
            model.graph.erase_node(user)
        folded = True
    model.recompile()
    return folded


def _transposed(node: Node) -> tuple[int, ...] | None:
    """The dimensions that a node swaps; None where it does something else."""
    if node.target is not torch.ops.aten.transpose.int:
        return None
    rank = node.meta["val"].dim()
    return tuple(sorted(dim % rank for dim in args_of(node)[1:]))
