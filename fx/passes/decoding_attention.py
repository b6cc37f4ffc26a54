"""Use `decoding_attention` in a decoder's step, and store the values that all of its layers read, such as RoPE's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import insert_before, named_args, register_buffer, value_of
from pt2mx.fx.graph.views import is_view
from pt2mx.fx.passes.fuse_decoding import FEW_ROWS
from pt2mx.ops.decoding import DecodingAttention, decoding_attention, stored

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default


@graph_pass(_ATTENTION)
def use_decoding_attention(model: GraphModule, everywhere: bool = False) -> None:
    """Replace attention of bfloat16 by `decoding_attention`, on an NVIDIA GPU (or `everywhere`).

    The pass skips causal attention, dropout, masks that are added, operands that broadcast, and graphs in which the
    number of heads is unknown.
    """
    calls = {n: named_args(n) for n in model.graph.find_nodes(op="call_function", target=_ATTENTION)}
    heads = [value_of(call["key"]).shape[1] for n, call in calls.items() if _fits(call, everywhere)]
    if not all(isinstance(n, int) for n in heads) or not heads:
        return
    device = value_of(next(iter(calls))).device
    name = register_buffer(
        model, "attention_zeros", torch.zeros(FEW_ROWS * max(heads), dtype=torch.int32, device=device)
    )
    with model.graph.inserting_before(next(iter(model.graph.nodes))):
        zeros = model.graph.get_attr(name)
    for node, call in calls.items():
        if _fits(call, everywhere):
            tensors = call["query"], call["key"], call["value"], call["attn_mask"]
            new = insert_before(node, decoding_attention, *tensors, call["scale"], zeros)
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            model.graph.erase_node(node)  # a seed may decide its values, so `erase_unused` keeps it


def _fits(call: dict[str, object], everywhere: bool) -> bool:
    operands = {name: value_of(call[name]) for name in ("query", "key", "value", "attn_mask")}
    is_unknown = any(call[name] is not None and value is None for name, value in operands.items())
    if call["dropout_p"] or call["is_causal"] or is_unknown:
        return False
    query, key, value, mask = operands.values()
    try:
        DecodingAttention(query, key, value, mask, None, None).check()
    except MXError:
        return False
    return everywhere or query.device.type == "cuda"


def store_positions(model: GraphModule, inputs: Sequence[str]) -> GraphModule:
    """Merge equal calls that depend on `inputs` alone, and store their values if several nodes read them. Otherwise
    Inductor computes RoPE's sines in each layer. Changes `model` and returns it.

    Args:
        model: the graph of a decoder.
        inputs: the names of the inputs that say where the tokens are.
    """
    of_positions = {node for node in model.graph.find_nodes(op="placeholder") if node.target in inputs}
    of_no_input: set[Node] = set()
    for node in model.graph.nodes:
        tensors = {n for n in node.all_input_nodes if isinstance(value_of(n), torch.Tensor)} - of_no_input
        if node.op in ("call_function", "get_attr") and of_positions.issuperset(tensors):
            (of_positions if tensors else of_no_input).add(node)
    _merge_equal([n for n in model.graph.nodes if n in of_positions or n in of_no_input])
    for node in [n for n in model.graph.nodes if n in of_positions and n.op == "call_function" and not is_view(n)]:
        value = value_of(node)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and len(_users(node, of_positions)) > 1:
            with model.graph.inserting_after(node):
                new = model.graph.call_function(stored, (node,))
            new.meta.update(node.meta)
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    model.recompile()
    return model


def _merge_equal(nodes: Sequence[Node]) -> None:
    """Merge equal calls into the first of them: an exported graph has one for each layer."""
    firsts: dict[tuple[object, ...], Node] = {}
    for node in nodes:
        if node.op == "call_function" and not node.is_impure():
            first = firsts.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                node.graph.erase_node(node)


def _users(node: Node, of_positions: set[Node]) -> list[Node]:
    """Return the other nodes that read a value, directly or through views."""
    users = []
    for user in node.users:
        users += _users(user, of_positions) if user in of_positions and is_view(user) else []
        users += [] if user in of_positions else [user]
    return users
