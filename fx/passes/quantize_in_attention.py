"""Attention on the CPU that quantizes its result before it stores it, as `quantize_in_products` lets products do."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import dtype_of, named_args, node_arg, set_value, shape_of, value_of
from pt2mx.fx.passes.quantize_in_products import quantization_of
from pt2mx.kernels.cpu.quantized_linear import BLOCK, suits
from pt2mx.ops.bfloat16_products import attention_bfloat16
from pt2mx.spec import MXSpec

aten = torch.ops.aten

_COPIES = (aten.contiguous.default, aten.clone.default)
_MERGING = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)


@GraphPass
def quantize_in_attention(model: GraphModule) -> None:
    """Replace the quantization of what `attention_bfloat16` gives, its heads next to each other, by the operator's own,
    where nothing else reads its result and the kernel quantizes like this: in blocks of 32 values, of which a head has
    whole ones, to even. The values stay the same to the bit."""
    written = written_nodes(model.graph)
    for quantized in list(model.graph.nodes):
        found = quantization_of(quantized)
        if found is None:
            continue
        product, activation, element, block_size, scale_mode, rounding, dtype = found
        path = _path_from_attention(product)
        if path is None or activation != "none" or not written.isdisjoint((quantized, *path)):
            continue
        attention, width = path[0], (shape_of(path[0]) or (None,))[-1]
        spec, given = MXSpec(element, block_size, -1, scale_mode, rounding), named_args(attention)
        value = value_of(attention)
        if given["elem_dtype_name"] is not None or block_size != BLOCK or value is None or value.device.type != "cpu":
            continue
        if not suits(spec, width, dtype_of(attention)):
            continue
        modes = element, block_size, scale_mode, rounding, dtype or dtype_of(product)
        attention.args, attention.kwargs = (*list(given.values())[:7], *modes), {}
        for node in path:
            set_value(node)
        quantized.replace_all_uses_with(product)
        model.graph.erase_node(quantized)


def _path_from_attention(product: Node) -> list[Node] | None:
    """The nodes from an attention to its values (B, S, heads * W), each the one reader of the one before; None where
    `product` is something else."""
    path, node = [product], product
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
    (*rows, heads, width), merged = shape_of(node) or (0, 0), shape_of(product)
    whole = isinstance(heads, int) and isinstance(width, int) and merged == (*rows, heads * width)
    return path[::-1] if whole and len(rows) == 2 else None
