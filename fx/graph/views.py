"""View operators, and which results of a graph may lie in memory with other strides: as a part of a larger tensor
does, or transposed."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.aliasing import Writes
from pt2mx.fx.graph.node import result_of, set_value
from pt2mx.ops.memory_format import order_in_memory

aten = torch.ops.aten

#: operators that put a tensor's dimensions in another order at most
REORDERING = (
    aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.mT.default,
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten.clone.default,
)  # fmt: skip
#: operators that may split dimensions
SPLITTING = (aten.view.default, aten.reshape.default, aten.unflatten.int)

#: views that only some strides allow, and what takes any
_VIEW_OF_ANY_STRIDES: dict[object, OpOverload] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
#: views of some strides, and copies of others
_VIEWS_OF_SOME_STRIDES = (
    *_VIEW_OF_ANY_STRIDES, *_VIEW_OF_ANY_STRIDES.values(), aten.flatten.using_ints, aten.ravel.default,
    aten.contiguous.default,
)  # fmt: skip
_NEED_STRIDES = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.view.dtype, aten.view_as_complex.default,
    aten.view_as_real.default,
)  # fmt: skip

#: composite operators that give a new tensor; others, as `dropout` in evaluation, may give what they were given
_COMPOSITES = (
    aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default, aten.layer_norm.default,
    aten.rms_norm.default, aten.softmax.int, aten.log_softmax.int,
)  # fmt: skip
_OWN_STRIDES = ("aten", "prims", "pt2mx")  # namespaces of operators that take any


def may_be_strided(node: Node) -> bool:
    """True if all that reads the memory of a node takes it with other strides."""
    return all(map(_takes_strides, node.users))


def _takes_strides(user: Node) -> bool:
    if user.target in _NEED_STRIDES:
        return False
    if is_view(user):
        return may_be_strided(user)
    if not isinstance(user.target, OpOverload) or user.target.namespace not in _OWN_STRIDES:
        return False
    composite = user.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return not composite or user.target in _COMPOSITES


def may_be_ordered_as(node: Node, value: object) -> bool:
    """True if all that is computed from a node, but views of it, lies in memory as before where the node's dimensions
    lie there as those of `value` (a fake tensor of its shape). Elementwise operators keep the order of what they get,
    sums and matmuls have an order of their own."""
    return all(_takes_order(user, node, value) for user in node.users)


def _takes_order(user: Node, node: Node, value: object) -> bool:
    ours = isinstance(user.target, OpOverload) and user.target.namespace in _OWN_STRIDES
    if user.target in _NEED_STRIDES or not (ours or is_view(user)):
        return False
    if user.target in _VIEW_OF_ANY_STRIDES:
        return False
    result = result_of(user, {node: value})
    same = _strides(result) == _strides(user.meta["val"])
    return same or (is_view(user) and may_be_ordered_as(user, result))


def takes_any_order(node: Node, writes: Writes) -> bool:
    """True if all that is computed from a node, of it or of its results, takes it in another order of dimensions in
    memory: the graph writes later neither through nor to what is a view in one order and a copy in another."""
    end = node.graph.output_node()
    reached, left = {node}, [node]
    while left:
        for user in left.pop().users:
            known = user.op == "output" or user.target is operator.getitem or isinstance(user.target, OpOverload)
            if not known or user.target in _NEED_STRIDES:
                return False
            if isinstance(user.target, OpOverload) and user.target.namespace not in _OWN_STRIDES:
                return False
            if writes and writes.between(user, end, _shared_by_order(user, writes)):
                return False
            if user not in reached:
                reached.add(user)
                left.append(user)
    return True


def _shared_by_order(user: Node, writes: Writes) -> tuple[Node, ...]:
    """The nodes whose memory a node shows, or is, in one order of dimensions in memory and not in another."""
    if user.target in _VIEWS_OF_SOME_STRIDES:
        return (user, *user.all_input_nodes)
    composite = isinstance(user.target, OpOverload) and user.target.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )
    return (user,) if composite and user.target not in _COMPOSITES and writes.shows_another(user) else ()


def settle_order(graph: Graph, changed: dict[Node, object]) -> None:
    """Bring a graph in order in which nodes lie in memory in another order of dimensions than before, and all readers
    take that (`takes_any_order`): what is computed from them gets the value that it has now, views that its strides do
    not allow become copies, and results of the graph get the order that they had.

    Args:
        changed: such nodes, and the value that each had.
    """
    for node in graph.nodes:
        if node.op == "output":
            with graph.inserting_before(node):  # behind all that writes to them
                node.args = torch.fx.map_arg(node.args, lambda n: _in_order(n, changed[n]) if n in changed else n)
        elif not changed.keys().isdisjoint(node.all_input_nodes):
            before = node.meta.get("val")
            node.target = _VIEW_OF_ANY_STRIDES.get(node.target, node.target)
            set_value(node)
            if _strides(before) != _strides(node.meta.get("val")):
                changed[node] = before


def _in_order(node: Node, value: object) -> Node:
    """A copy of a node that lies in memory as `value` does; the node itself where it is no tensor."""
    if not isinstance(value, torch.Tensor):
        return node
    order = order_in_memory(value)
    call = functools.partial(_call, node.meta)
    dense = call(call(node, aten.permute.default, order), aten.clone.default, memory_format=torch.contiguous_format)
    return call(dense, aten.permute.default, [order.index(d) for d in range(len(order))])


def _call(meta: dict[str, Any], node: Node, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
    new = node.graph.call_function(target, (node, *args), kwargs)
    new.meta.update(meta)
    set_value(new)
    return new


def _strides(value: object) -> list[tuple[int, ...]]:
    return [x.stride() for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def is_view(node: Node) -> bool:
    """True if a node's result is memory of its first argument."""
    if isinstance(node.target, OpOverload):
        return any(returned.alias_info is not None for returned in node.target._schema.returns)
    return node.target is operator.getitem  # of several views


def allow_any_strides(node: Node) -> None:
    """Make copies of a node's views where its strides ask for that, and give them the values that they have now."""
    for user in node.users:
        user.target = _VIEW_OF_ANY_STRIDES.get(user.target, user.target)
        if is_view(user):
            set_value(user)
            allow_any_strides(user)
