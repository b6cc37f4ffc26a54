"""Quantized activations: `quantize_mx -> getitem x2 -> dequantize_mx` becomes one `fake_quantize_mx`."""

import operator

from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.arguments import make_positional
from pt2mx.fx.graph.unused import erase_unread
from pt2mx.fx.graph.values import dtype_of, shape_of


def fuse_qdq(model: GraphModule) -> GraphModule:
    """Put a `fake_quantize_mx` in the place of every pair that computes the same, to the bit.

    Left alone are codes that something else reads, and pairs whose ends differ in format, blocks, dtype or shape. It
    runs where the tensor was quantized: what is written to the tensor later does not reach it, and of several
    stochastic ones each draws its turn. Changes `model` and returns it.
    """
    for dequantize in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
        quantize = _quantize_of(dequantize)
        if quantize is None:
            continue
        with model.graph.inserting_before(quantize):
            fused = model.graph.call_function(ops.fake_quantize_mx, quantize.args)
        fused.meta.update(dequantize.meta)
        dequantize.replace_all_uses_with(fused)
        erase_unread(dequantize)
    model.recompile()
    return model


def _quantize_of(dequantize: Node) -> Node | None:
    """The other end of a pair that can be fused."""
    make_positional(dequantize, 6)
    data, scale, *modes, dtype, axis = dequantize.args[:6]
    if not all(n.target is operator.getitem and n.args[0].target is ops.quantize_mx for n in (data, scale)):
        return None
    quantize = data.args[0]
    make_positional(quantize, 4)
    x, *own_modes, own_axis = quantize.args[:4]
    rank = len(shape_of(x) or ())
    same = (
        (scale.args, data.args) == ((quantize, 0), (quantize, 1))
        and rank
        and (modes, axis % rank) == (own_modes, own_axis % rank)
        and (dtype, shape_of(dequantize)) == (dtype_of(x), shape_of(x))
    )
    read_once = set(quantize.users) == {data, scale} and {*data.users, *scale.users} == {dequantize}
    return quantize if same and read_once else None
