"""Results of calls are quantized by calls: on a GPU our kernel takes two thirds of the time of Inductor's, and there is
nothing that Inductor could fuse with it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import FakeQuantize, node_arg, set_value, shape_of
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.fp8_rows import mm_fp8_rows
from pt2mx.ops.rotated_quantization import rotated_fake_quantize_mx

aten = torch.ops.aten


@GraphPass
def quantize_in_calls(model: GraphModule) -> None:
    """Replace `fake_quantize_mx` of what `mm_fp8_rows` gives, along its last dimension, by `rotated_fake_quantize_mx`
    without a rotation, which Inductor keeps: queries, keys and values of an attention."""
    for node, call in FakeQuantize.calls_in(model.graph):
        product, shape = _whole(call.x), shape_of(call.x)
        if product.target is not mm_fp8_rows or shape is None or call.axis not in (-1, len(shape) - 1):
            continue
        if call.ste != "identity" or ROUNDINGS[call.rounding].random:
            continue
        args = product, 1, call.element, call.block_size, call.scale_mode, call.rounding
        with model.graph.inserting_before(node):
            quantized = model.graph.call_function(rotated_fake_quantize_mx, args)
        set_value(quantized)
        node.replace_all_uses_with(quantized)
        model.graph.erase_node(node)


def _whole(x: Node) -> Node:
    """The source of a slice that takes all of it; another node as it is."""
    if x.target is aten.slice.Tensor and shape_of(x) == shape_of(node_arg(x)):
        return node_arg(x)
    return x
