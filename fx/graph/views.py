"""View operators, and the operators that need certain strides: may the result of a node become a view of a slice?"""

from __future__ import annotations

import functools
import operator

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pt2mx.fx.graph.node import set_value

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

#: composite operators that return a new tensor; others may return their input, as `dropout` in evaluation does
_RETURN_NEW = (
    aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default, aten.layer_norm.default,
    aten.rms_norm.default, aten.softmax.int, aten.log_softmax.int,
)  # fmt: skip
#: namespaces of operators that support any strides
_NAMESPACES = ("aten", "prims", "pt2mx")


def is_view(node: Node) -> bool:
    """Return whether a node's result may alias its first argument."""
    if isinstance(node.target, OpOverload):
        return returns_view(node.target)
    return node.target is operator.getitem  # of several views


@functools.lru_cache(1024)
def returns_view(target: OpOverload) -> bool:
    """Return whether a result of an operator shares memory with an argument, by the operator's schema."""
    return any(returned.alias_info is not None for returned in target._schema.returns)


def supports_strides(target: object) -> bool:
    """Return whether a function is an operator that supports any strides."""
    return isinstance(target, OpOverload) and target.namespace in _NAMESPACES and target not in NEED_STRIDES


@functools.lru_cache(1024)
def may_return_input(target: OpOverload) -> bool:
    """Return whether a composite operator may return its input."""
    is_composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composite and bool(target._schema.returns) and target not in _RETURN_NEW


def accepts_any_strides(node: Node) -> bool:
    """Return whether all users of a node's memory support other strides. `allow_any_strides` then updates the users."""
    return all(map(_accepts_any_strides, node.users))


def _accepts_any_strides(user: Node) -> bool:
    if user.target in NEED_STRIDES:
        return False
    if is_view(user):
        return accepts_any_strides(user)
    return isinstance(user.target, OpOverload) and supports_strides(user.target) and not may_return_input(user.target)


def allow_any_strides(node: Node) -> None:
    """Replace a node's views by operators that support any strides, and update the views' values."""
    for user in node.users:
        user.target = VIEW_OF_ANY_STRIDES.get(user.target, user.target)
        if is_view(user):
            set_value(user)
            allow_any_strides(user)
