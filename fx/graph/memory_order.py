"""The strides of a result, and the order of its dimensions in memory: may a pass change them, and the update of the
graph if it does.

A result may become a view of a slice, with other strides and the same order (`accepts_any_strides`), or get another
order (`accepts_any_order`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.aliasing import Writes, is_view, may_return_input
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
VIEW_OF_ANY_STRIDES: dict[object, OpOverload] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
#: operators whose values or errors depend on strides
NEED_STRIDES = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.view.dtype, aten.view_as_complex.default,
    aten.view_as_real.default,
)  # fmt: skip
#: operators that return a view for some orders, and a copy for others
_VIEWS_OF_SOME_ORDERS = (
    *VIEW_OF_ANY_STRIDES, *VIEW_OF_ANY_STRIDES.values(), aten.flatten.using_ints, aten.ravel.default,
    aten.contiguous.default,
)  # fmt: skip
#: namespaces of operators that support any strides
_NAMESPACES = ("aten", "prims", "pt2mx")


def accepts_any_strides(node: Node) -> bool:
    """Return whether all users of a node's memory support other strides. `allow_any_strides` then updates the users."""
    return all(map(_accepts_any_strides, node.users))


def _accepts_any_strides(user: Node) -> bool:
    if user.target in NEED_STRIDES:
        return False
    if is_view(user):
        return accepts_any_strides(user)
    return isinstance(user.target, OpOverload) and supports_strides(user.target) and not may_return_input(user.target)


def supports_strides(target: object) -> bool:
    """Return whether a function is an operator that supports any strides."""
    return isinstance(target, OpOverload) and target.namespace in _NAMESPACES and target not in NEED_STRIDES


def allow_any_strides(node: Node) -> None:
    """Replace a node's views by operators that support any strides, and update the views' values."""
    for user in node.users:
        user.target = VIEW_OF_ANY_STRIDES.get(user.target, user.target)
        if is_view(user):
            set_value(user)
            allow_any_strides(user)


def accepts_order_of(node: Node, value: object) -> bool:
    """Return whether a node may take the strides of `value`, a fake tensor of its shape, without changing the strides
    of any other result than its views.

    Elementwise operators keep the dimension order of their input; sums and matmuls choose their own.
    """
    return all(_accepts_order(user, node, value) for user in node.users)


def _accepts_order(user: Node, node: Node, value: object) -> bool:
    if user.target in NEED_STRIDES or user.target in VIEW_OF_ANY_STRIDES:
        return False
    if not (supports_strides(user.target) or is_view(user)):
        return False
    result = result_of(user, {node: value})
    return same_strides(result, user.meta["val"]) or (is_view(user) and accepts_order_of(user, result))


def accepts_any_order(node: Node, writes: Writes) -> bool:
    """Return whether all direct and indirect users of a node support another dimension order. `settle_order` then
    updates the users.

    Some operators return a view for one order and a copy for another. The graph must not write to such a result later,
    nor to the memory that it may be a view of.
    """
    end = node.graph.output_node()
    reached, left = {node}, [node]
    while left:
        for user in left.pop().users:
            if not (user.op == "output" or user.target is operator.getitem or supports_strides(user.target)):
                return False
            if writes and writes.between(user, end, _shared_by_order(user, writes)):
                return False
            if user not in reached:
                reached.add(user)
                left.append(user)
    return True


def _shared_by_order(user: Node, writes: Writes) -> tuple[Node, ...]:
    """Return the nodes that a user aliases in one dimension order and not in another, and the user itself."""
    if user.target in _VIEWS_OF_SOME_ORDERS:
        return (user, *user.all_input_nodes)
    is_composite = isinstance(user.target, OpOverload) and may_return_input(user.target)
    return (user,) if is_composite and writes.shows_another(user) else ()


def settle_order(graph: Graph, changed: dict[Node, object]) -> None:
    """Update a graph after the dimension order of some nodes changed, which all users support (`accepts_any_order`).

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
            node.target = VIEW_OF_ANY_STRIDES.get(node.target, node.target)
            set_value(node)
            if not same_strides(before, node.meta.get("val")):
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


def same_strides(value: object, other: object) -> bool:
    """Return whether two values have tensors of the same strides, as far as is known without a guard."""
    strides = [[x.stride() for x in pytree.tree_leaves(v) if isinstance(x, torch.Tensor)] for v in (value, other)]
    return len(strides[0]) == len(strides[1]) and all(map(same_sizes, *strides))


def same_sizes(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether two shapes, or the strides of two tensors, are equal, as far as is known without a guard."""
    return len(sizes) == len(others) and all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))
