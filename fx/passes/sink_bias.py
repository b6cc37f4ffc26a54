"""The bias of a packed product whose result is quantized next is added behind it, in the kernel that quantizes.

Inductor fuses nothing into a call: without this, the queries and keys of an attention are written by the product, and
read and written again by a kernel that quantizes alone.
"""

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import LinearMX
from pt2mx.fx.graph.views import is_view
from pt2mx.ops import linear

aten = torch.ops.aten


@GraphPass
def sink_bias(model: GraphModule) -> None:
    """Take the bias out of every `linear_mx` that `fake_quantize_mx` alone reads, through views if need be."""
    for product in model.graph.find_nodes(op="call_function", target=linear.linear_mx):
        bias = LinearMX.of(product).bias
        if bias is None or not _is_quantized_next(product):
            continue
        with model.graph.inserting_after(product):
            added = model.graph.call_function(aten.add.Tensor, (product, bias))
        added.meta.update(product.meta)
        product.replace_all_uses_with(added, delete_user_cb=lambda user, own=added: user is not own)
        product.args = tuple(LinearMX.of(product)._replace(bias=None))


def _is_quantized_next(node: Node) -> bool:
    def leads_there(user: Node) -> bool:
        return user.target is ops.fake_quantize_mx or (is_view(user) and _is_quantized_next(user))

    return bool(node.users) and all(map(leads_there, node.users))
