"""Models that were lowered, which a report does not know: their products and gathers read packed weights."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.node import node_arg
from pt2mx.fx.graph.subgraphs import graph_modules
from pt2mx.ops import linear, scaled_mm
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.fp8_rows import mm_fp8_rows
from pt2mx.ops.quantized_convolution import conv2d_fake_quantize_mx
from pt2mx.ops.quantized_linear import linear_fake_quantize_mx

aten = torch.ops.aten

#: operators that read codes and scales themselves
_PACKED = (
    linear.linear_mx,
    linear.grouped_linear_mx,
    linear.linear_mx_mma_layout,
    linear_fake_quantize_mx,
    conv2d_mx,
    conv2d_fake_quantize_mx,
    scaled_mm.scaled_mm_mx,
    mm_fp8_rows,
    attention_mx,
)
_GATHERS = (aten.embedding.default, aten.index_select.default, aten.index.Tensor)


def refuse_lowered(model: GraphModule) -> None:
    """Raise an `MXError` for a model in which an operator reads a packed weight."""
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            if node.target in _PACKED or _gathers_codes(node):
                raise MXError(
                    f"{node} reads a packed weight, as lower_to_inductor leaves it: report the converted model, before "
                    "it is lowered; pt2mx.packed_weights lists what this one holds"
                )


def _gathers_codes(node: Node) -> bool:
    """True where rows of a weight's codes are dequantized."""
    codes = node_arg(node) if node.target is ops.dequantize_mx else node
    return codes is not node and codes.target in _GATHERS and node_arg(codes).op == "get_attr"
