"""Attention that quantizes its result before it stores it, as `quantize_in_products` lets products do."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import FakeQuantize, dtype_of, named_args, node_arg, set_value, shape_of, value_of
from pt2mx.fx.passes.quantize_in_products import quantization_of
from pt2mx.kernels.constants import BLOCK, WIDEST, supports_epilogue
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.bfloat16_products import attention_bfloat16
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.spec import MXSpec

aten = torch.ops.aten

_COPIES = (aten.contiguous.default, aten.clone.default)
_MERGING = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)


@graph_pass(attention_bfloat16)
def quantize_in_attention(model: GraphModule) -> None:
    """Replace the quantization of what `attention_bfloat16` gives, its heads next to each other, and a cast after it,
    by the operator's own, where nothing else reads its result and the kernel quantizes like this: in blocks of 32
    values, of which a head has whole ones, to even. The values stay the same to the bit."""
    written = written_nodes(model.graph)
    for quantized in list(model.graph.nodes):
        found = _quantization_of(quantized)
        if found is None:
            continue
        product, activation, element, block_size, scale_mode, rounding, dtype = found
        path = _path_from_attention(product)
        if path is None or activation != "none" or not written.isdisjoint((quantized, *path)):
            continue
        attention, spec = path[0], MXSpec(element, block_size, -1, scale_mode, rounding)
        given = named_args(attention)
        if given["elem_dtype_name"] is not None or not _serves(attention, spec):
            continue
        dtype = dtype or dtype_of(product)
        casts = _casts_of(quantized, written) if dtype == dtype_of(product) else []
        dtype = dtype_of(casts[0]) if casts else dtype
        modes = element, block_size, scale_mode, rounding, dtype
        attention.args, attention.kwargs = (*list(given.values())[:7], *modes), {}
        for node in path:
            set_value(node)
        for node in (*casts, quantized):
            node.replace_all_uses_with(product)
            model.graph.erase_node(node)


def _quantization_of(node: Node) -> tuple[Any, ...] | None:
    """As `quantization_of`, and of a `fake_quantize_mx` along the last dimension whose gradient is the identity."""
    of = FakeQuantize.of(node)
    if of is None:
        return quantization_of(node)
    along_last = of.axis in (-1, len(shape_of(of.x) or ()) - 1)
    if not along_last or of.ste != "identity" or ROUNDINGS[of.rounding].random:
        return None
    return of.x, "none", of.element, of.block_size, of.scale_mode, of.rounding, None


def _serves(attention: Node, spec: MXSpec) -> bool:
    value, width = value_of(attention), (shape_of(attention) or (None,))[-1]
    if value is None or not isinstance(width, int) or width > WIDEST.get(value.device.type, 0):
        return False
    return spec.block_size == BLOCK and supports_epilogue(spec, width, value.dtype)


def _casts_of(quantized: Node, written: set[Node]) -> list[Node]:
    """The one reader of quantized values, where that casts them and nothing writes what it gives; else none."""
    readers = [n for n in quantized.users if n.target is aten.to.dtype and len(n.args) == 2 and not n.kwargs]
    fits = len(quantized.users) == 1 and written.isdisjoint(readers)
    return [n for n in readers if fits and dtype_of(n) in HIGH_PRECISION]


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
