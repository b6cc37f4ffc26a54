"""The part of `fuse_quantize_epilogue` for convolutions: `conv2d_mx`, residual sum, activation, quantization."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Node

from pt2mx.fx.graph.aliasing import Writes
from pt2mx.fx.graph.memory_order import same_sizes, same_strides
from pt2mx.fx.graph.node import (
    Conv2dMX,
    FakeQuantize,
    dtype_of,
    function_of,
    insert_before,
    insert_call,
    named_args,
    node_arg,
    result_of,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.fx.passes.fuse_activation_quantize import ACTIVATIONS
from pt2mx.kernels.constants import supports_epilogue
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.quantize_epilogue import Conv2dFakeQuantize

if TYPE_CHECKING:
    from pt2mx.fx.passes.fuse_quantize_epilogue import Quantization

aten = torch.ops.aten

#: activations, also in place
_ACTIVATIONS = {**ACTIVATIONS, aten.relu_.default: "relu", aten.silu_.default: "silu", aten.gelu_.default: "gelu"}
#: operator of a sum -> the operands that may be the convolution
_SUMS: dict[object, tuple[str, ...]] = {aten.add.Tensor: ("self", "other"), aten.add_.Tensor: ("self",)}
_VIEWS = (
    aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.unsqueeze.default, aten.alias.default,
)  # fmt: skip


@dataclass(frozen=True)
class _Chain:
    """The nodes from a `conv2d_mx` to a quantization, in order: views of its result; the sum with a residual, and the
    residual's argument name; the activation; views, whose last result is quantized."""

    convolution: Node
    views: list[Node]
    sum: Node | None
    residual: str
    activated: Node | None
    views_back: list[Node]
    activation: str
    quantization: Quantization

    @property
    def computed(self) -> list[Node]:
        """Return the nodes up to the one with the values to quantize."""
        return [self.convolution, *self.views, *(node for node in (self.sum, self.activated) if node is not None)]

    @property
    def has_other_users(self) -> bool:
        """Return whether something else uses the values to quantize."""
        return any(len(node.users) > 1 for node in (self.computed[-1], *self.views_back))


def fuse_convolution(quantization: Quantization, writes: Writes) -> tuple[Node, Callable[[], None]] | None:
    """Fuse a quantization into a convolution. If something else uses the activation too, the operator returns it as
    well."""
    chain = None if FakeQuantize.of(quantization.node) else _chain(quantization)
    if chain is None or not _is_fusible(chain, writes):
        return None
    return chain.convolution, lambda: _replace(chain)


def _chain(quantization: Quantization) -> _Chain | None:
    """Return the chain that ends at a quantization; None if it begins at no convolution."""
    source, views_back = _through_views(quantization.source)
    activation = quantization.activation
    activated = added = None
    if activation == "none" and source.target in _ACTIVATIONS:
        args = named_args(source)
        activation = "gelu_tanh" if args.get("approximate") == "tanh" else _ACTIVATIONS[source.target]
        activated, source = source, args["self"]
    residual = ""
    if source.target in _SUMS:
        added, (source, residual) = source, _summands(source)
    convolution, views = _through_views(source)
    if convolution.target is not conv2d_mx:
        return None
    if activated is None and added is None:
        views, views_back = [], views + views_back
    return _Chain(convolution, views, added, residual, activated, views_back, activation, quantization)


def _through_views(node: Node) -> tuple[Node, list[Node]]:
    """Return the node that another is a view of, and the views, first to last."""
    views: list[Node] = []
    while node.target in _VIEWS and node.all_input_nodes == [node.args[0]]:
        views, node = [node, *views], node_arg(node)
    return node, views


def _summands(added: Node) -> tuple[Node, str]:
    """Return the operand of a sum that is a convolution, and the name of the other operand; the sum itself if neither
    is."""
    args = named_args(added)
    pair = args["self"], args["other"]
    alike = all(isinstance(n, Node) and shape_of(n) == shape_of(added) and dtype_of(n) == dtype_of(added) for n in pair)
    for name in _SUMS[added.target] if alike and args["alpha"] == 1 and pair[0] is not pair[1] else ():
        if _through_views(args[name])[0].target is conv2d_mx:
            return args[name], "other" if name == "self" else "self"
    return added, ""


def _is_fusible(chain: _Chain, writes: Writes) -> bool:
    """Return whether the kernel can compute a chain, and nothing else uses or writes its intermediate values."""
    if any(len(node.users) > 1 for node in chain.computed[:-1]):
        return False
    if not Conv2dMX.expect(chain.convolution).spec.has_plain_scale:
        return False
    value, dtype = value_of(chain.convolution), dtype_of(chain.convolution)
    if not isinstance(value, Tensor) or not supports_epilogue(chain.quantization.spec, value.shape[-1], dtype):
        return False
    viewed = _seen_through(chain.views, value)
    back, computed = _seen_through(chain.views_back, viewed), value_of(chain.computed[-1])
    if not (same_sizes(back.shape, value.shape) and same_strides(back, value)) or computed.dtype != dtype:
        return False
    if chain.has_other_users and not same_strides(computed, viewed):
        return False
    steps, last = [node for node in chain.computed if node not in chain.views], chain.computed[-1]
    if any(writes.between(a, b, [a]) for a, b in itertools.pairwise([*steps, chain.quantization.node])):
        return False
    if chain.sum is not None and writes.between(chain.sum, last, [named_args(chain.sum)[chain.residual]]):
        return False
    return not writes.between(chain.convolution, last, chain.convolution.all_input_nodes)


def _seen_through(views: list[Node], value: Tensor) -> Tensor:
    for view in views:
        value = result_of(view, {node_arg(view): value})
    return value


def _replace(chain: _Chain) -> None:
    last, quantized = chain.computed[-1], chain.quantization.node

    def viewed(node: Node, views: list[Node]) -> Node:
        for view in views:
            node = insert_before(last, function_of(view), node, *view.args[1:])
        return node

    residual = None if chain.sum is None else viewed(named_args(chain.sum)[chain.residual], chain.views_back)
    keeps = chain.has_other_users
    call = Conv2dMX.expect(chain.convolution).as_call_of(
        Conv2dFakeQuantize,
        product_dtype=dtype_of(chain.convolution),
        residual=residual,
        activation=chain.activation,
        keep_activated=keeps,
        out_spec=chain.quantization.spec,
        target_dtype=chain.quantization.dtype,
    )
    fused = insert_call(last, call)
    if keeps:
        activated = viewed(insert_before(last, operator.getitem, fused, 0), chain.views)
        activated.meta.update({key: value for key, value in last.meta.items() if key != "val"})
        last.replace_all_uses_with(activated)
    result = insert_before(last, operator.getitem, fused, 1)
    result.meta.update({key: value for key, value in quantized.meta.items() if key != "val"})
    quantized.replace_all_uses_with(result)
    for node in (quantized, *reversed(chain.views_back), chain.activated, chain.sum):
        if node is not None and not node.users:  # also in-place operators, which write only the convolution's result
            node.graph.erase_node(node)
    erase_unused(chain.views[-1] if chain.views else chain.convolution)
