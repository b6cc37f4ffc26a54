"""Products of one tensor with several packed weights are one: queries, keys and values, a gate and what it gates.

A call costs some microseconds whatever its size; a token's products of a small layer take no longer than that.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from pt2mx import linear
from pt2mx.fx.aliasing import is_written, written_roots
from pt2mx.fx.constants import constant_nodes
from pt2mx.fx.fold_weights import register
from pt2mx.fx.unused import erase_unread
from pt2mx.fx.values import set_value

aten = torch.ops.aten

#: views that only some strides allow, and what takes any
_VIEW_OF_ANY_STRIDES = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
_NEED_STRIDES = (aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default, aten.view_as_real.default)

#: composite operators that give a new tensor; others, as `dropout` in evaluation, may give what they were given
_COMPOSITES = (
    aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default, aten.layer_norm.default,
    aten.rms_norm.default, aten.softmax.int, aten.log_softmax.int,
)  # fmt: skip
_OWN_STRIDES = ("aten", "prims", "pt2mx")  # namespaces of operators that take any
_WHOLE = 16  # rows of a weight that kernels take together


def join_products(model: GraphModule) -> GraphModule:
    """Let every `linear_mx` of the same x, element and block size, with weights and biases of its own, be one of the
    weights behind each other; each result is a part of its last dimension, a view. Weights whose rows are whole tiles
    are joined with such alone. Results that leave the graph, that are written to, or whose readers are not known to
    take any strides, stay as they are. Changes `model` and returns it."""
    constants, roots = constant_nodes(model.graph), written_roots(model.graph)
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in model.graph.find_nodes(op="call_function", target=linear.linear_mx):
        x, data, scale, bias, element, block_size = node.args
        own = [n for n in (data, scale, bias) if n is not None]
        is_constant = all(n.op == "get_attr" and n in constants and len(n.users) == 1 for n in own)
        if is_constant and not is_written(x, roots) and not is_written(node, roots) and _may_be_strided(node):
            is_whole = len(operator.attrgetter(data.target)(model)) % _WHOLE == 0
            groups[x, element, block_size, bias is None, is_whole].append(node)
    for products in groups.values():
        if len(products) > 1:
            _join(model, products)
    model.recompile()
    return model


def _may_be_strided(node: Node) -> bool:
    """Whether all that reads the memory of a node takes it with other strides."""
    return all(map(_takes_strides, node.users))


def _takes_strides(user: Node) -> bool:
    if _is_view(user):
        return user.target not in _NEED_STRIDES and _may_be_strided(user)
    if not isinstance(user.target, torch._ops.OpOverload) or user.target.namespace not in _OWN_STRIDES:
        return False
    composite = user.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return not composite or user.target in _COMPOSITES


def _is_view(node: Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return any(returned.alias_info is not None for returned in node.target._schema.returns)
    return node.target is operator.getitem  # of several views


def _join(model: GraphModule, products: list[Node]) -> None:
    first = products[0]
    x, _, _, bias, element, block_size = first.args
    with model.graph.inserting_before(first):
        tensors = [_joined(model, [p.args[i] for p in products]) for i in (1, 2)]
        biases = None if bias is None else _joined(model, [p.args[3] for p in products])
        joined = model.graph.call_function(linear.linear_mx, (x, *tensors, biases, element, block_size))
    joined.meta.update(first.meta)
    set_value(joined)
    start = 0
    for product in products:
        end = start + len(operator.attrgetter(product.args[1].target)(model))
        with model.graph.inserting_before(first):
            part = model.graph.call_function(aten.slice.Tensor, (joined, -1, start, end))
        part.meta.update(product.meta)
        set_value(part)
        product.replace_all_uses_with(part)
        _allow_any_strides(part)
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


def _allow_any_strides(node: Node) -> None:
    for user in node.users:
        user.target = _VIEW_OF_ANY_STRIDES.get(user.target, user.target)
        if _is_view(user):
            _allow_any_strides(user)
