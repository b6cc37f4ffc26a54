"""Fuse a quantization into the epilogue of the operator that computes the tensor: the operator stores quantized values.

This saves memory traffic, and a kernel that reads the values only to quantize them.

| producer | fused operator | before the quantization | where |
|---|---|---|---|
| `linear_mx` | `linear_fake_quantize_mx` | an activation | CPU, many rows of bfloat16 |
| `attention_bfloat16` | the same operator, with an element | concatenation of the heads, a cast | CPU and GPU |
| `conv2d_mx` | `conv2d_fake_quantize_mx` | a residual sum, an activation | CPU |
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import Writes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.memory_order import same_sizes, same_strides
from pt2mx.fx.graph.node import (
    AttentionBfloat16,
    Conv2dMX,
    FakeQuantize,
    LinearMX,
    RotatedFakeQuantize,
    dtype_of,
    function_of,
    insert_before,
    insert_call,
    named_args,
    node_arg,
    result_of,
    set_value,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.tensors import erase_unused, replace_node
from pt2mx.fx.passes.fuse_activation_quantize import ACTIVATIONS
from pt2mx.kernels.constants import BLOCK, supports_epilogue
from pt2mx.kernels.select import supports
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.activations import ActivationFakeQuantize
from pt2mx.ops.attention import attention_bfloat16
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.quantize_epilogue import Conv2dFakeQuantize, LinearFakeQuantize
from pt2mx.spec import MXSpec

aten = torch.ops.aten

_QUANTIZATIONS = (ActivationFakeQuantize.overload, RotatedFakeQuantize.overload, FakeQuantize.overload)
_COPIES = (aten.contiguous.default, aten.clone.default)
_MERGING = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)
#: activations, also in place
_ACTIVATIONS = {**ACTIVATIONS, aten.relu_.default: "relu", aten.silu_.default: "silu", aten.gelu_.default: "gelu"}
#: operator of a sum -> the operands that may be the convolution
_SUMS: dict[object, tuple[str, ...]] = {aten.add.Tensor: ("self", "other"), aten.add_.Tensor: ("self",)}
_VIEWS = (
    aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.unsqueeze.default, aten.alias.default,
)  # fmt: skip


class Quantization(NamedTuple):
    """A quantization of `source` along the last dimension, after an activation. dtype: of the result; None for the
    dtype of `source`."""

    node: Node
    source: Node
    activation: str
    spec: MXSpec
    dtype: torch.dtype | None

    @classmethod
    def of(cls, node: Node) -> Quantization | None:
        """Return the quantization that a node computes; None for another node, or if its gradient is not the
        identity."""
        if node.target is ActivationFakeQuantize.overload:
            activated: ActivationFakeQuantize[Node] = ActivationFakeQuantize.from_args(*named_args(node).values())
            return cls(node, activated.x, activated.activation, activated.spec, activated.target_dtype)
        if (rotated := RotatedFakeQuantize.of(node)) is not None:
            return cls(node, rotated.x, "none", rotated.spec, rotated.target_dtype) if rotated.size == 1 else None
        call = FakeQuantize.of(node)
        if call is None or call.spec.axis not in (-1, len(shape_of(call.x) or ()) - 1):
            return None
        if call.ste != "identity" or ROUNDINGS[call.spec.rounding].random or not call.spec.has_plain_scale:
            return None
        return cls(node, call.x, "none", call.spec, None)


#: the operator's node that can store quantized values, and a function that fuses the quantization into it
_Fusion = tuple[Node, Callable[[], None]]


@graph_pass(
    (LinearMX, attention_bfloat16, conv2d_mx), (ActivationFakeQuantize.overload, RotatedFakeQuantize, FakeQuantize)
)
def fuse_quantize_epilogue(model: GraphModule) -> None:
    """Replace an operator and the quantization of its result by one operator.

    Nothing else may use the values in between. Kernels quantize in blocks of 32 values, rounding to even.

    The values stay the same to the bit, except GELU and SiLU after a convolution, whose last bits become more exact.
    """
    writes, fusions = Writes(model.graph), dict[Node, Callable[[], None]]()
    for node in [n for n in model.graph.nodes if n.target in _QUANTIZATIONS]:
        quantization = Quantization.of(node)
        if quantization is not None:
            for find in _EPILOGUES:
                if (fusion := find(quantization, writes)) is not None:
                    fusions.setdefault(*fusion)
    for fuse in fusions.values():
        fuse()


def _linear(quantization: Quantization, writes: Writes) -> _Fusion | None:
    """Fuse a quantization into a bfloat16 linear layer of many rows, where its kernel supports that."""
    quantized, matmul = quantization.node, quantization.source
    call = LinearMX.of(matmul)
    if call is None or FakeQuantize.of(quantized) or set(matmul.users) != {quantized} or not call.spec.has_plain_scale:
        return None
    k = (shape_of(call.x) or (None,))[-1]
    if not isinstance(k, int) or call.rotation or dtype_of(call.x) != torch.bfloat16:
        return None
    has_any_values = call.target_dtype is None  # `use_bf16_matmul` sets a dtype where x consists of integers
    use = "quantize the result of a matmul"
    if not supports(use, value_of(matmul), quantization.spec, call.spec, k, has_any_values):
        return None

    def fuse() -> None:
        call = LinearMX.expect(matmul).as_call_of(  # another fusion may have replaced its input
            LinearFakeQuantize,
            product_dtype=dtype_of(matmul),
            activation=quantization.activation,
            out_spec=quantization.spec,
            target_dtype=quantization.dtype,
        )
        fused = insert_call(matmul, call)
        replace_node(quantized, fused, "val")

    return matmul, fuse


def _attention(quantization: Quantization, writes: Writes) -> _Fusion | None:
    """Fuse a quantization, with a cast after it, into an attention whose heads are concatenated and have whole
    blocks."""
    quantized, merged = quantization.node, quantization.source
    path = _path_from_attention(merged)
    if path is None or quantization.activation != "none" or writes.reach((quantized, *path)):
        return None
    attention = path[0]
    if AttentionBfloat16.expect(attention).spec is not None or quantization.spec.block_size != BLOCK:
        return None
    if not supports("quantize the result of attention", value_of(attention), quantization.spec):
        return None
    dtype = quantization.dtype or dtype_of(merged)
    casts = _casts_of(quantized, writes) if dtype == dtype_of(merged) else []

    def fuse() -> None:
        out_dtype = dtype_of(casts[0]) if casts else dtype
        call = AttentionBfloat16.expect(attention).replace(spec=quantization.spec, out_dtype=out_dtype)
        attention.args, attention.kwargs = call.args, {}
        for node in path:
            set_value(node)
        for node in (*casts, quantized):
            node.replace_all_uses_with(merged)
            node.graph.erase_node(node)

    return attention, fuse


def _casts_of(quantized: Node, writes: Writes) -> list[Node]:
    """Return the one user of quantized values if it casts them and the graph does not write its result; else an empty
    list."""
    casts = [n for n in quantized.users if n.target is aten.to.dtype and len(n.args) == 2 and not n.kwargs]
    fits = len(quantized.users) == 1 and not writes.reach(casts)
    return [n for n in casts if fits and dtype_of(n) in HIGH_PRECISION]


def _path_from_attention(merged: Node) -> list[Node] | None:
    """Return the nodes from an attention to its concatenated heads `merged`, (B, S, heads * W), each the only user of
    the one before; None if `merged` is something else."""
    path, node = [merged], merged
    if node.target not in _MERGING:
        return None
    while (node := node_arg(node)).target in _COPIES:
        path.append(node)
    if node.target is not aten.transpose.int or {d % 4 for d in node.args[1:3] if isinstance(d, int)} != {1, 2}:
        return None
    attention = node_arg(node)
    path += [node, attention]
    if attention.target is not attention_bfloat16 or any(len(n.users) != 1 for n in path):
        return None
    (*rows, heads, width), shape = shape_of(node) or (0, 0), shape_of(merged)
    is_merged = isinstance(heads, int) and isinstance(width, int) and shape == (*rows, heads * width)
    return path[::-1] if is_merged and len(rows) == 2 else None


def _convolution(quantization: Quantization, writes: Writes) -> _Fusion | None:
    """Fuse a quantization into a convolution. If something else uses the activation too, the operator returns it as
    well."""
    chain = None if FakeQuantize.of(quantization.node) else _chain(quantization)
    if chain is None or not _is_fusible(chain, writes):
        return None
    return chain.convolution, lambda: _fuse_chain(chain)


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


def _fuse_chain(chain: _Chain) -> None:
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


_EPILOGUES = (_linear, _attention, _convolution)
