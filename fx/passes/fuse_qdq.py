"""Quantized activations: `quantize_mx -> getitem x2 -> dequantize_mx` becomes one `fake_quantize_mx`."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import Dequantize, Quantize, dtype_of, shape_of
from pt2mx.fx.graph.qdq import quantize_of
from pt2mx.fx.graph.tensors import erase_unread


@GraphPass
def fuse_qdq(model: GraphModule) -> None:
    """Put a `fake_quantize_mx` in the place of every pair that computes the same, to the bit.

    Codes that something else reads stay, and so do pairs whose ends differ in format, blocks, dtype or shape. It runs
    where the tensor was quantized: what is written to the tensor later does not reach it, and of several stochastic
    ones each draws its turn.
    """
    for dequantize in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
        quantize = quantize_of(dequantize)
        if quantize is None or not _can_be_fused(quantize, dequantize):
            continue
        with model.graph.inserting_before(quantize):
            fused = model.graph.call_function(ops.fake_quantize_mx, tuple(Quantize.of(quantize)))
        fused.meta.update(dequantize.meta)
        dequantize.replace_all_uses_with(fused)
        erase_unread(dequantize)


def _can_be_fused(quantize: Node, dequantize: Node) -> bool:
    """Whether a pair gives the dtype and shape of what it quantizes, and nothing else reads its codes."""
    x, to = Quantize.of(quantize).x, Dequantize.of(dequantize)
    read_once = set(quantize.users) == {to.codes, to.scale} and {*to.codes.users, *to.scale.users} == {dequantize}
    return read_once and (to.dtype, shape_of(dequantize)) == (dtype_of(x), shape_of(x))
