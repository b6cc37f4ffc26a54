"""Convolutions on the CPU that add a residual, compute an activation and quantize it before they store it, as
`quantize_in_products` lets products do."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.activations import NAMES, call_before
from pt2mx.fx.graph.aliasing import Writes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import dtype_of, named_args, node_arg, result_of, shape_of, value_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.fx.passes.quantize_in_products import quantization_of
from pt2mx.kernels.constants import supports_epilogue
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.quantized_convolution import conv2d_fake_quantize_mx
from pt2mx.spec import MXSpec

aten = torch.ops.aten

_ACTIVATIONS = {**NAMES, aten.relu_.default: "relu", aten.silu_.default: "silu", aten.gelu_.default: "gelu"}
#: sums -> the operands that a convolution may give
_SUMS: dict[object, tuple[str, ...]] = {aten.add.Tensor: ("self", "other"), aten.add_.Tensor: ("self",)}
_VIEWS = (
    aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.unsqueeze.default, aten.alias.default,
)  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """From a convolution to the quantization of what is computed of it: the `conv2d_mx`; views of its result; the sum
    with a residual, and which operand that is; the activation; and views back, of which the last is quantized."""

    product: Node
    views: list[Node]
    sum: Node | None
    residual: str
    activated: Node | None
    views_back: list[Node]
    activation: str
    modes: tuple[Any, ...]
    quantized: Node

    @property
    def computed(self) -> list[Node]:
        """The nodes up to the one that has the values which are quantized."""
        return [self.product, *self.views, *(node for node in (self.sum, self.activated) if node is not None)]

    @property
    def is_read(self) -> bool:
        """True if something else reads the values that are quantized."""
        return any(len(node.users) > 1 for node in (self.computed[-1], *self.views_back))


@graph_pass(conv2d_mx)
def quantize_in_convolutions(model: GraphModule) -> None:
    """Replace the quantization of what a `conv2d_mx` gives, with the sum and the activation between, by
    `conv2d_fake_quantize_mx`, where nothing else reads what is between and the kernel quantizes like this: in blocks of
    32 values, to even. An activation that something else reads too is a result of the operator. GELU and SiLU are
    nearer to exact values in their last bits; other values stay the same to the bit."""
    writes, chains = Writes(model.graph), {}
    for node in model.graph.nodes:
        chain = _chain(node)
        if chain is not None and chain.product not in chains and _fits(chain, writes):
            chains[chain.product] = chain
    for chain in chains.values():
        _replace(chain)


def _chain(quantized: Node) -> Chain | None:
    """The chain that ends at a node; None where it is no quantization of what a convolution gives."""
    found = quantization_of(quantized)
    if found is None:
        return None
    source, activation, *modes = found
    source, views_back = _through_views(source)
    activated = added = None
    if activation == "none" and source.target in _ACTIVATIONS:
        given = named_args(source)
        activation = "gelu_tanh" if given.get("approximate") == "tanh" else _ACTIVATIONS[source.target]
        activated, source = source, given["self"]
    residual = ""
    if source.target in _SUMS:
        added, (source, residual) = source, _summands(source)
    product, views = _through_views(source)
    if product.target is not conv2d_mx:
        return None
    if activated is None and added is None:
        views, views_back = [], views + views_back
    return Chain(product, views, added, residual, activated, views_back, activation, tuple(modes), quantized)


def _through_views(node: Node) -> tuple[Node, list[Node]]:
    """The node of whose result a node is a view, and the views, the first first."""
    views: list[Node] = []
    while node.target in _VIEWS and node.all_input_nodes == [node.args[0]]:
        views, node = [node, *views], node_arg(node)
    return node, views


def _summands(added: Node) -> tuple[Node, str]:
    """The operand of a sum that a convolution gives, and the name of the other; the sum itself where there is none."""
    given = named_args(added)
    pair = given["self"], given["other"]
    alike = all(isinstance(n, Node) and shape_of(n) == shape_of(added) and dtype_of(n) == dtype_of(added) for n in pair)
    for name in _SUMS[added.target] if alike and given["alpha"] == 1 and pair[0] is not pair[1] else ():
        if _through_views(given[name])[0].target is conv2d_mx:
            return given[name], "other" if name == "self" else "self"
    return added, ""


def _fits(chain: Chain, writes: Writes) -> bool:
    """True if the kernel computes a chain, and nothing else reads or writes what is between."""
    if any(len(node.users) > 1 for node in chain.computed[:-1]):
        return False
    value, dtype = value_of(chain.product), dtype_of(chain.product)
    element, block_size, scale_mode, rounding, _ = chain.modes
    if not isinstance(value, Tensor) or not supports_epilogue(
        MXSpec(element, block_size, -1, scale_mode, rounding), value.shape[-1], dtype
    ):
        return False
    viewed = _seen_through(chain.views, value)
    back, given = _seen_through(chain.views_back, viewed), value_of(chain.computed[-1])
    if (back.shape, back.stride()) != (value.shape, value.stride()) or given.dtype != dtype:
        return False
    if chain.is_read and given.stride() != viewed.stride():
        return False
    steps, last = [node for node in chain.computed if node not in chain.views], chain.computed[-1]
    if any(writes.between(a, b, [a]) for a, b in itertools.pairwise([*steps, chain.quantized])):
        return False
    if chain.sum is not None and writes.between(chain.sum, last, [named_args(chain.sum)[chain.residual]]):
        return False
    return not writes.between(chain.product, last, chain.product.all_input_nodes)


def _seen_through(views: list[Node], value: Tensor) -> Tensor:
    for view in views:
        value = result_of(view, {node_arg(view): value})
    return value


def _replace(chain: Chain) -> None:
    place = chain.computed[-1]

    def viewed(node: Node, views: list[Node]) -> Node:
        for view in views:
            node = call_before(place, view.target, node, *view.args[1:])
        return node

    residual = None if chain.sum is None else viewed(named_args(chain.sum)[chain.residual], chain.views_back)
    product = {**named_args(chain.product), "target_dtype": dtype_of(chain.product)}
    kept, modes = chain.is_read, chain.modes
    fused = call_before(place, conv2d_fake_quantize_mx, *product.values(), residual, chain.activation, kept, *modes)
    if kept:
        activated = viewed(call_before(place, operator.getitem, fused, 0), chain.views)
        activated.meta.update({key: value for key, value in place.meta.items() if key != "val"})
        place.replace_all_uses_with(activated)
    quantized = call_before(place, operator.getitem, fused, 1)
    quantized.meta.update({key: value for key, value in chain.quantized.meta.items() if key != "val"})
    chain.quantized.replace_all_uses_with(quantized)
    for node in (chain.quantized, *reversed(chain.views_back), chain.activated, chain.sum):
        if node is not None and not node.users:  # also what writes, to memory of the product alone
            node.graph.erase_node(node)
    erase_unused(chain.views[-1] if chain.views else chain.product)
