"""Fuse the quantization of an activation: `quantize_mx -> getitem x2 -> dequantize_mx` becomes `fake_quantize_mx`."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import Dequantize, Quantize, dtype_of, shape_of
from pt2mx.fx.graph.qdq import quantize_of
from pt2mx.fx.graph.tensors import erase_unused


@graph_pass(Quantize, Dequantize)
def fuse_qdq(model: GraphModule) -> None:
    """Replace every pair by a `fake_quantize_mx`, which computes the same bits.

    The pass skips codes that something else uses, and pairs whose ends differ in format, blocks, dtype or shape. The
    new node takes the position of `quantize_mx`: later writes to the tensor do not reach it, and stochastic roundings
    draw their numbers in the same order.
    """
    for dequantize, to in Dequantize.calls_in(model.graph):
        quantize = quantize_of(dequantize)
        if quantize is None or not _is_read_once(quantize, dequantize, to):
            continue
        of = Quantize.expect(quantize)
        if (to.dtype, shape_of(dequantize)) != (dtype_of(of.x), shape_of(of.x)):
            continue
        with model.graph.inserting_before(quantize):
            fused = model.graph.call_function(ops.fake_quantize_mx, (*of.args, "identity"))
        fused.meta.update(dequantize.meta)
        dequantize.replace_all_uses_with(fused)
        erase_unused(dequantize)


def _is_read_once(quantize: Node, dequantize: Node, to: Dequantize) -> bool:
    """Return whether only `dequantize` uses the codes and scales of its pair."""
    return set(quantize.users) == {to.codes, to.scale} and {*to.codes.users, *to.scale.users} == {dequantize}
