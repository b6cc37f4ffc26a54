"""Products of one tensor with several packed weights are one: queries, keys and values, a gate and what it gates.

A call costs some microseconds whatever its size; a token's products of a small layer take no longer than that.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.attributes import name_of, register_buffer, tensor_of
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import LinearMX, set_value
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.fx.graph.views import allow_any_strides, may_be_strided
from pt2mx.ops import linear

aten = torch.ops.aten

_WHOLE = 16  # rows of a weight that kernels take together


@graph_pass(LinearMX, LinearMX)
def merge_linears(model: GraphModule) -> None:
    """Make one `linear_mx` of those of the same x, element and block size whose weights and biases are their own, with
    the weights behind each other; each result is a part of its last dimension, a view. Weights whose rows are whole
    tiles are joined with such alone. Results that leave the graph, that are written to, or whose readers are not known
    to take any strides, stay as they are."""
    constants, written = constant_nodes(model.graph), written_nodes(model.graph)
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node, call in LinearMX.calls_in(model.graph):
        own = [n for n in (call.codes, call.scale, call.bias) if n is not None]
        is_constant = all(n.op == "get_attr" and n in constants and len(n.users) == 1 for n in own)
        if is_constant and written.isdisjoint((call.x, node)) and may_be_strided(node):
            is_whole = len(tensor_of(model, call.codes)) % _WHOLE == 0
            same = call.x, call.element, call.block_size, call.rotation, call.target_dtype, call.bias is None, is_whole
            groups[same].append(node)
    for products in groups.values():
        if len(products) > 1:
            _join(model, products)


def _join(model: GraphModule, products: list[Node]) -> None:
    first, calls = products[0], [LinearMX.expect(product) for product in products]
    biases = [call.bias for call in calls if call.bias is not None]  # all have one, or none has
    with model.graph.inserting_before(first):
        whole = calls[0].replace(
            codes=_joined(model, [call.codes for call in calls]),
            scale=_joined(model, [call.scale for call in calls]),
            bias=_joined(model, biases) if biases else None,
        )
        joined = model.graph.call_function(linear.linear_mx, whole.args)
    joined.meta.update(first.meta)
    set_value(joined)
    start = 0
    for product, call in zip(products, calls, strict=True):
        end = start + len(tensor_of(model, call.codes))
        with model.graph.inserting_before(first):
            part = model.graph.call_function(aten.slice.Tensor, (joined, -1, start, end))
        part.meta.update(product.meta)
        set_value(part)
        product.replace_all_uses_with(part)
        allow_any_strides(part)
        start = end
    for product in products:
        erase_unused(product)


def _joined(model: GraphModule, nodes: list[Node]) -> Node:
    """A buffer of tensors behind each other."""
    value = torch.cat([tensor_of(model, node) for node in nodes])
    node = model.graph.get_attr(register_buffer(model, f"{name_of(nodes[0])}_joined", value))
    node.meta.update(nodes[0].meta)
    if "val" in node.meta:
        node.meta["val"] = node.meta["val"].new_empty(value.shape)
    return node
