"""Move the bias of a linear layer into the kernel that quantizes its result.

Inductor fuses nothing into a call. Without this pass, the linear layer writes the queries and keys of an attention, and
a kernel that only quantizes reads and writes them again.
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
    """Take the bias out of every `linear_mx` whose only users are `fake_quantize_mx`, directly or through views."""
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
