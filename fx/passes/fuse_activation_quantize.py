"""Fuse activation quantization into the kernel that produces the activation (residual add + LayerNorm, GELU, SiLU,
ReLU, the bias of a linear layer, or a plain copy).

Inductor's own code for these operators is slower.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import is_view, written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    FakeQuantize,
    LinearMX,
    RotatedFakeQuantize,
    insert_before,
    insert_call,
    named_args,
    node_arg,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.kernels.select import supports
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.activations import ActivationFakeQuantize, LayerNormFakeQuantize
from pt2mx.ops.attention import attention_bfloat16, attention_mx, matmul_bfloat16
from pt2mx.ops.fp8_rowwise import mm_fp8_rows
from pt2mx.ops.linear import linear_mx
from pt2mx.ops.memory_format import contiguous_order, order_in_memory

aten = torch.ops.aten
#: fewest values for which a call is faster than Inductor's fused code, despite its overhead of 25 us
_MIN_VALUES = 1 << 16
#: operators that Inductor calls, and does not generate code for
_CALLS = (
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.matmul.default,
    aten.scaled_dot_product_attention.default, linear_mx, mm_fp8_rows, attention_mx, matmul_bfloat16,
    attention_bfloat16,
)  # fmt: skip
#: operator -> the name of the activation that kernels compute before they quantize
ACTIVATIONS: dict[object, str] = {
    aten.gelu.default: "gelu",
    aten.silu.default: "silu",
    aten.relu.default: "relu",
}


class LayerNorm(NamedTuple):
    """A layer norm along the last dimension, of x or of x plus a residual."""

    node: Node
    x: Node
    residual: Node | None
    weight: Node | None
    bias: Node | None
    eps: float


@graph_pass((FakeQuantize, RotatedFakeQuantize))
def fuse_activation_quantize(model: GraphModule) -> None:
    """Fuse `fake_quantize_mx` along the last dimension, and `rotated_fake_quantize_mx` without a rotation, with the
    norm or the activation before it, into `layer_norm_fake_quantize_mx` or `activation_fake_quantize_mx`.

    The pass skips small tensors, random roundings, clipped gradients, elements of more than 8 bits and machines without
    kernels; on a GPU also tensors that Inductor computes. A tensor that the graph writes is read at its old position.
    """
    written = written_nodes(model.graph)
    for node in [n for n in model.graph.nodes if n.target in (FakeQuantize.overload, RotatedFakeQuantize.overload)]:
        call = _fusible_quantization(node)
        if call is None:
            continue
        dtype = getattr(call, "target_dtype", None)
        norm = norm_before(call.x, written)
        activation, source = activation_before(call.x, written)
        if norm is not None:
            fused = insert_call(norm.node, LayerNormFakeQuantize(*norm[1:], call.spec, dtype))
            normed, quantized = (insert_before(norm.node, operator.getitem, fused, i) for i in range(2))
            replace_node(norm.node, normed)
        elif activation != "none" or isinstance(call, FakeQuantize):
            quantized = insert_call(node, ActivationFakeQuantize(source, activation, call.spec, dtype))
        else:
            continue  # `rotated_fake_quantize_mx` is a call already
        replace_node(node, quantized, "val")


def activation_before(x: Node, written: set[Node]) -> tuple[str, Node]:
    """Return the name of the activation that computes x for its one user, and the activation's input; "none" and x if
    the kernels do not support it, or if the graph writes its input or its result."""
    name = ACTIVATIONS.get(x.target)
    if name is None or len(x.users) > 1 or not written.isdisjoint((x, *x.all_input_nodes)):
        return "none", x
    args = named_args(x)
    if name == "gelu" and args["approximate"] == "tanh":
        name = "gelu_tanh"
    return name, args[next(iter(args))]


def norm_before(x: Node, written: set[Node]) -> LayerNorm | None:
    """Return the layer norm that computes x, also through a dropout in evaluation; None if another node computes x, or
    if the graph writes it."""
    while x.target is aten.dropout.default and not named_args(x)["train"] and x not in written:
        x = named_args(x)["input"]
    if x.target is not aten.layer_norm.default or x in written:
        return None
    args, shape = named_args(x), shape_of(x)
    source = args["input"]
    if shape is None or list(args["normalized_shape"]) != list(shape[-1:]):
        return None
    norm = LayerNorm(x, source, None, args["weight"], args["bias"], args["eps"])
    if source.target is aten.add.Tensor and len(source.users) == 1:
        added = named_args(source)
        a, b = added["self"], added["other"]
        alike = shape_of(a) == shape_of(b) == shape and value_of(a).dtype == value_of(b).dtype == value_of(x).dtype
        if added["alpha"] == 1 and alike and written.isdisjoint((a, b)):
            return norm._replace(x=a, residual=b)
    return norm


def fuses_quantization(node: Node) -> bool:
    """Return whether `fuse_activation_quantize` replaces a `fake_quantize_mx`."""
    return _fusible_quantization(node) is not None


def _fusible_quantization(node: Node) -> FakeQuantize | RotatedFakeQuantize | None:
    """Return the quantization that the pass can fuse; None for other nodes and for quantizations that stay."""
    call = FakeQuantize.of(node) or RotatedFakeQuantize.of(node)
    value, shape = (None, None) if call is None else (value_of(call.x), shape_of(call.x))
    if call is None or value is None or not shape:
        return None
    known = [n for n in shape if isinstance(n, int)]
    if len(known) == len(shape) and math.prod(known) < _MIN_VALUES:
        return None
    if isinstance(call, RotatedFakeQuantize):
        stays = call.size > 1
    else:
        is_random = ROUNDINGS[call.spec.rounding].random
        stays = call.spec.axis not in (-1, len(shape) - 1) or call.ste != "identity" or is_random
    if stays or not call.spec.has_plain_scale:
        return None
    if order_in_memory(value) != contiguous_order(value):  # a quantization keeps this order, a fused call does not
        return None
    if not supports("quantize activations", value, call.spec):
        return None
    return call if supports("quantize activations alone", value) or _is_of_kernel(call.x) else None


def _is_of_kernel(x: Node) -> bool:
    """Return whether a kernel can compute x, an activation or a norm, before it quantizes, or a call produces x.

    Otherwise Inductor generates the kernel that produces x, and quantizes there.
    """
    if x.target in ACTIVATIONS or norm_before(x, set()) is not None:
        return True
    while is_view(x):
        x = node_arg(x)
    return x.target in _CALLS


@graph_pass(LinearMX, ops.fake_quantize_mx)
def sink_bias(model: GraphModule) -> None:
    """Take the bias out of every `linear_mx` whose only users are `fake_quantize_mx`, directly or through views: the
    kernel that quantizes adds it.

    Inductor fuses nothing into a call. Without this pass, the linear layer writes the queries and keys of an attention,
    and a kernel that only quantizes reads and writes them again.
    """
    for matmul, call in LinearMX.calls_in(model.graph):
        if call.bias is None or not _is_quantized_next(matmul):
            continue
        with model.graph.inserting_after(matmul):
            added = model.graph.call_function(aten.add.Tensor, (matmul, call.bias))
        added.meta.update(matmul.meta)
        matmul.replace_all_uses_with(added, delete_user_cb=functools.partial(operator.is_not, added))
        matmul.args = call.replace(bias=None).args


def _is_quantized_next(node: Node) -> bool:
    """Return whether only `fake_quantize_mx` uses a node, directly or through views, and Inductor will generate it."""

    def leads_there(user: Node) -> bool:
        if user.target is ops.fake_quantize_mx:
            return not fuses_quantization(user)
        return is_view(user) and _is_quantized_next(user)

    return bool(node.users) and all(map(leads_there, node.users))
