"""Weights kept as the values that their codes stand for, where time matters and memory does not."""

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.arguments import make_positional
from pt2mx.fx.graph.constants import computed_from, constant_nodes, evaluate, root_name
from pt2mx.fx.graph.values import dtype_of, set_value, shape_of
from pt2mx.fx.passes.fold_weights import fold_constant
from pt2mx.ops import linear

aten = torch.ops.aten


def unpack_weights(model: GraphModule) -> GraphModule:
    """Dequantize every weight now, to a buffer `<weight>_data_unpacked`, once for all that read it: `linear_mx` becomes
    `linear`, and convolutions and other readers of a `dequantize_mx` find it computed.

    Rows that are gathered stay packed, and so do the experts of `grouped_linear_mx` and weights that are operands of a
    graph inside another. Changes `model` and returns it.
    """
    constants = {n for n in constant_nodes(model.graph) if all(c.op != "placeholder" for c in computed_from(n))}
    buffers: dict[tuple[object, ...], Node] = {}
    for node in model.graph.find_nodes(op="call_function", target=linear.linear_mx):
        k = (shape_of(node.args[0]) or (None,))[-1]
        if constants.issuperset(node.args[1:3]) and isinstance(k, int):
            constants.add(_use_plain_product(model, node, k))
    for node in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
        if node in constants:
            make_positional(node, 7)
            data, *others, axis, length = node.args
            weight = (data, *others, axis % evaluate(model, data).dim(), shape_of(node) or length)
            if weight not in buffers:
                buffers[weight] = fold_constant(model, node, f"{root_name(node)}_unpacked")
            node.replace_all_uses_with(buffers[weight])
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _use_plain_product(model: GraphModule, packed: Node, k: int) -> Node:
    """Replace a `linear_mx`; gives the node of its dequantized weight."""
    x, data, scale, bias, element, block_size = packed.args
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
