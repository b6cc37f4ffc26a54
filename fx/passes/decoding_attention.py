"""Use the operators of attention in a decoder's step, and store the values that all of its layers read, such as
RoPE's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.aliasing import is_view
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import AttentionMX, DecodingAttentionMX, insert_call, named_args, register_buffer, value_of
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.kernels.select import supports
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.decoding import DecodingAttention, stored

aten = torch.ops.aten

#: sequences up to which the last program of a head joins the results of the others
JOINED_SEQUENCES = 64

_ATTENTION = aten.scaled_dot_product_attention.default
_Operator = DecodingAttention[Any] | DecodingAttentionMX


class _Call(NamedTuple):
    """An attention, the call that replaces it, and the same call of values."""

    node: Node
    operator: _Operator
    values: Any

    @property
    def heads(self) -> Any:
        """The number of heads of the keys."""
        values = self.values
        keys = values.keys if isinstance(values, DecodingAttention) else values.key_data
        return keys.shape[1]

    @property
    def has_kernel(self) -> bool:
        """True where a kernel supports the operator alone; of `attention_mx` a kernel may support codes."""
        values = self.values
        if isinstance(values, DecodingAttention):
            return supports("attend to new tokens", values.query, values.keys, values.values)
        return supports("attend to codes of new tokens", values.query)


@graph_pass((_ATTENTION, attention_mx))
def use_decoding_attention(model: GraphModule) -> None:
    """Replace attention by `decoding_attention`, and `attention_mx` by `decoding_attention_mx`, where the device has a
    kernel of the operator.

    The pass skips causal attention, dropout, masks that are added, operands that broadcast, scales of a tensor, and
    graphs in which the number of heads is unknown.
    """
    calls = [call for node in model.graph.nodes if (call := _call(node)) and call.has_kernel]
    if not calls or not all(isinstance(call.heads, int) for call in calls):
        return
    zeros = None
    query = calls[0].values.query
    if supports("count programs of attention", query):
        most = JOINED_SEQUENCES * max(call.heads for call in calls)
        counters = torch.zeros(most, dtype=torch.int32, device=query.device)
        name = register_buffer(model, "attention_zeros", counters)
        with model.graph.inserting_before(next(iter(model.graph.nodes))):
            zeros = model.graph.get_attr(name)
    for node, operator, _ in calls:
        new = insert_call(node, operator.replace(zeros=zeros))
        replace_node(node, new)


def _call(node: Node) -> _Call | None:
    """Return the call that replaces an attention; None for other nodes."""
    if node.target not in (_ATTENTION, attention_mx):
        return None
    args = named_args(node)
    if args.get("dropout_p") or args.get("is_causal") or args.get("key_tensor_scale"):
        return None
    call: _Operator
    if node.target is _ATTENTION:
        call = DecodingAttention(args["query"], args["key"], args["value"], args["attn_mask"], args["scale"], None)
    else:
        of_codes = AttentionMX.expect(node)
        cache = of_codes.key_data, of_codes.key_scale, of_codes.value_data, of_codes.value_scale
        shape = of_codes.spec, of_codes.value_width
        call = DecodingAttentionMX(of_codes.query, *cache, *shape, of_codes.mask, of_codes.scale, None)
    values = {}
    for field in dataclasses.fields(call):
        argument = getattr(call, field.name)
        if isinstance(argument, Node):
            values[field.name] = value_of(argument)
            if values[field.name] is None:
                return None
    of_values = call.replace(**values)
    try:
        of_values.check()
    except MXError:
        return None
    return _Call(node, call, of_values)


def store_positions(model: GraphModule, inputs: Sequence[str]) -> GraphModule:
    """Merge equal calls that depend on `inputs` alone, and store their values if several nodes read them. Otherwise
    Inductor computes RoPE's sines and the mask in each layer. Changes `model` and returns it.

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
        is_array = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dtype == torch.bool)
        if is_array and len(_users(node, of_positions)) > 1:
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
