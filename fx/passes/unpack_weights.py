"""Weights kept as the values that their codes stand for, where time matters and memory does not."""

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import computed_from, constant_nodes, evaluate, root_name
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import Dequantize, LinearMX, dtype_of, set_value, shape_of
from pt2mx.fx.passes.fold_weights import fold_constant
from pt2mx.ops import linear

aten = torch.ops.aten


@GraphPass
def unpack_weights(model: GraphModule) -> None:
    """Dequantize every weight now, to a buffer `<weight>_data_unpacked`, once for all that read it: `linear_mx` becomes
    `linear`, and convolutions and other readers of a `dequantize_mx` find it computed.

    Rows that are gathered stay packed, and so do the experts of `grouped_linear_mx` and weights that are operands of a
    graph inside another.
    """
    constants = {n for n in constant_nodes(model.graph) if all(c.op != "placeholder" for c in computed_from(n))}
    buffers: dict[tuple[object, ...], Node] = {}
    for node in model.graph.find_nodes(op="call_function", target=linear.linear_mx):
        x, codes, scale, *_ = LinearMX.of(node)
        k = (shape_of(x) or (None,))[-1]
        if constants.issuperset((codes, scale)) and isinstance(k, int):
            constants.add(_use_plain_product(model, node, k))
    for node in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
        if node in constants:
            of = Dequantize.of(node)
            axis, length = of.axis % evaluate(model, of.codes).dim(), shape_of(node) or of.length
            weight = tuple(of._replace(axis=axis, length=length))
            if weight not in buffers:
                buffers[weight] = fold_constant(model, node, f"{root_name(node)}_unpacked")
            node.replace_all_uses_with(buffers[weight])
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()


def _use_plain_product(model: GraphModule, packed: Node, k: int) -> Node:
    """Replace a `linear_mx`; gives the node of its dequantized weight."""
    x, data, scale, bias, element, block_size = LinearMX.of(packed)
    with model.graph.inserting_before(packed):
        weight = model.graph.call_function(
            ops.dequantize_mx, (data, scale, element, block_size, dtype_of(packed), -1, k)
        )
        plain = model.graph.call_function(aten.linear.default, (x, weight, bias))
    set_value(weight)
    plain.meta.update(packed.meta)
    packed.replace_all_uses_with(plain)
    model.graph.erase_node(packed)
    return weight
