"""The bias of a packed product whose result is quantized next is added behind it, in the kernel that quantizes.

Inductor fuses nothing into a call: without this, the queries and keys of an attention are written by the product, and
read and written again by a kernel that quantizes alone.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import LinearMX
from pt2mx.fx.graph.views import is_view
from pt2mx.fx.passes.fuse_activation_quantize import fuses_quantization

aten = torch.ops.aten


@graph_pass(LinearMX, ops.fake_quantize_mx)
def sink_bias(model: GraphModule) -> None:
    """Take the bias out of every `linear_mx` that `fake_quantize_mx` alone reads, through views if need be."""
    for product, call in LinearMX.calls_in(model.graph):
        if call.bias is None or not _is_quantized_next(product):
            continue
        with model.graph.inserting_after(product):
            added = model.graph.call_function(aten.add.Tensor, (product, call.bias))
        added.meta.update(product.meta)
        product.replace_all_uses_with(added, delete_user_cb=functools.partial(operator.is_not, added))
        product.args = call.replace(bias=None).args


def _is_quantized_next(node: Node) -> bool:
    """True if `fake_quantize_mx` alone reads a node, maybe through views, and no call takes its place."""

    def leads_there(user: Node) -> bool:
        if user.target is ops.fake_quantize_mx:
            return not fuses_quantization(user)
        return is_view(user) and _is_quantized_next(user)

    return bool(node.users) and all(map(leads_there, node.users))
