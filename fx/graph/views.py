"""View operators, and queries whether a node's result may have other strides: those of a slice, or transposed ones."""

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

#: operators that at most permute a tensor's dimensions
REORDERING = (
    aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.mT.default,
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten.clone.default,
)  # fmt: skip
#: operators that may split dimensions
SPLITTING = (aten.view.default, aten.reshape.default, aten.unflatten.int)

#: view operators that reject some strides -> the operator that copies instead
_VIEW_OF_ANY_STRIDES: dict[object, OpOverload] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
#: operators that return a view for some strides, and a copy for others
_VIEWS_OF_SOME_STRIDES = (
    *_VIEW_OF_ANY_STRIDES, *_VIEW_OF_ANY_STRIDES.values(), aten.flatten.using_ints, aten.ravel.default,
    aten.contiguous.default,
)  # fmt: skip
_NEED_STRIDES = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.view.dtype, aten.view_as_complex.default,
    aten.view_as_real.default,
)  # fmt: skip

#: composite operators that return a new tensor; others may return their input, as `dropout` in evaluation does
_COMPOSITES = (
    aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default, aten.layer_norm.default,
    aten.rms_norm.default, aten.softmax.int, aten.log_softmax.int,
)  # fmt: skip
_OWN_STRIDES = ("aten", "prims", "pt2mx")  # namespaces of operators that support any strides


def may_be_strided(node: Node) -> bool:
    """Return whether all users of a node's memory support other strides."""
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
    """Return whether a node may take the strides of `value`, a fake tensor of its shape, without changing the strides
    of any other result than its views.

    Elementwise operators keep the dimension order of their input; sums and matmuls choose their own.
    """
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
    """Return whether all direct and indirect users of a node support another dimension order in memory.

    Some operators return a view for one order and a copy for another. The graph must not write to such a result later,
    nor to the memory that it may be a view of.
    """
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
    """Return the nodes that a user aliases in one dimension order and not in another, and the user itself."""
    if user.target in _VIEWS_OF_SOME_STRIDES:
        return (user, *user.all_input_nodes)
    composite = isinstance(user.target, OpOverload) and user.target.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )
    return (user,) if composite and user.target not in _COMPOSITES and writes.shows_another(user) else ()


def settle_order(graph: Graph, changed: dict[Node, object]) -> None:
    """Update a graph after the dimension order of some nodes in memory changed, which all users support
    (`takes_any_order`).

    The users get new `val` meta. Views that the new strides do not allow become reshapes. Outputs of the graph get
    their old order back.

    Args:
        changed: each changed node -> its value before the change.
    """
    for node in graph.nodes:
        if node.op == "output":
            with graph.inserting_before(node):  # after all writes to them
                node.args = torch.fx.map_arg(node.args, lambda n: _in_order(n, changed[n]) if n in changed else n)
        elif not changed.keys().isdisjoint(node.all_input_nodes):
            before = node.meta.get("val")
            node.target = _VIEW_OF_ANY_STRIDES.get(node.target, node.target)
            set_value(node)
            if _strides(before) != _strides(node.meta.get("val")):
                changed[node] = before


def _in_order(node: Node, value: object) -> Node:
    """Return a copy of a node in the dimension order of `value`; the node itself if `value` is no tensor."""
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
    """Return whether a node's result may alias its first argument."""
    if isinstance(node.target, OpOverload):
        return any(returned.alias_info is not None for returned in node.target._schema.returns)
    return node.target is operator.getitem  # of several views


def allow_any_strides(node: Node) -> None:
    """Replace a node's views by operators that support any strides, and update the views' values."""
    for user in node.users:
        user.target = _VIEW_OF_ANY_STRIDES.get(user.target, user.target)
        if is_view(user):
            set_value(user)
            allow_any_strides(user)
