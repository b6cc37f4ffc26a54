"""Products of one tensor with several packed weights are one: queries, keys and values, a gate and what it gates.

A call costs some microseconds whatever its size; a token's products of a small layer take no longer than that.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import LinearMX, set_value
from pt2mx.fx.graph.tensors import erase_unread
from pt2mx.fx.graph.views import allow_any_strides, may_be_strided
from pt2mx.fx.passes.fold_weights import register
from pt2mx.ops import linear

aten = torch.ops.aten

_WHOLE = 16  # rows of a weight that kernels take together


@GraphPass
def merge_linears(model: GraphModule) -> None:
    """Let every `linear_mx` of the same x, element and block size, with weights and biases of its own, be one of the
    weights behind each other; each result is a part of its last dimension, a view. Weights whose rows are whole tiles
    are joined with such alone. Results that leave the graph, that are written to, or whose readers are not known to
    take any strides, stay as they are."""
    constants, written = constant_nodes(model.graph), written_nodes(model.graph)
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in model.graph.find_nodes(op="call_function", target=linear.linear_mx):
        x, data, scale, bias, element, block_size = LinearMX.of(node)
        own = [n for n in (data, scale, bias) if n is not None]
        is_constant = all(n.op == "get_attr" and n in constants and len(n.users) == 1 for n in own)
        if is_constant and written.isdisjoint((x, node)) and may_be_strided(node):
            is_whole = len(operator.attrgetter(data.target)(model)) % _WHOLE == 0
            groups[x, element, block_size, bias is None, is_whole].append(node)
    for products in groups.values():
        if len(products) > 1:
            _join(model, products)


def _join(model: GraphModule, products: list[Node]) -> None:
    first, calls = products[0], [LinearMX.of(product) for product in products]
    with model.graph.inserting_before(first):
        codes, scale = (_joined(model, list(part)) for part in list(zip(*calls, strict=True))[1:3])
        bias = None if calls[0].bias is None else _joined(model, [call.bias for call in calls])
        args = calls[0]._replace(codes=codes, scale=scale, bias=bias)
        joined = model.graph.call_function(linear.linear_mx, tuple(args))
    joined.meta.update(first.meta)
    set_value(joined)
    start = 0
    for product, call in zip(products, calls, strict=True):
        end = start + len(operator.attrgetter(call.codes.target)(model))
        with model.graph.inserting_before(first):
            part = model.graph.call_function(aten.slice.Tensor, (joined, -1, start, end))
        part.meta.update(product.meta)
        set_value(part)
        product.replace_all_uses_with(part)
        allow_any_strides(part)
        start = end
    for product in products:
        erase_unread(product)


def _joined(model: GraphModule, nodes: list[Node]) -> Node:
    tensors = [operator.attrgetter(node.target)(model) for node in nodes]
    node = model.graph.get_attr(register(model, f"{nodes[0].target}_joined", torch.cat(tensors)))
    node.meta.update(nodes[0].meta)
    if "val" in node.meta:
        node.meta["val"] = node.meta["val"].new_empty(operator.attrgetter(node.target)(model).shape)
    return node
