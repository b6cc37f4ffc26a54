"""Weights kept as the values that their codes stand for, where time matters and memory does not."""

import torch
from torch.fx import GraphModule, Node

from pt2mx import linear, ops
from pt2mx.fx.constants import computed_from, constant_nodes, root_name
from pt2mx.fx.fold_weights import fold_constant
from pt2mx.fx.values import dtype_of, set_value, shape_of

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
        if constants.issuperset(node.args[1:3]) and isinstance(shape_of(node.args[0])[-1], int):
            constants.add(_use_plain_product(model, node))
    for node in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
        if node in constants:
            of_weight = (node.args, *node.kwargs.items())
            if of_weight not in buffers:
                buffers[of_weight] = fold_constant(model, _in_order(model, node), f"{root_name(node)}_unpacked")
            node.replace_all_uses_with(buffers[of_weight])
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _in_order(model: GraphModule, weight: Node) -> Node:
    """The weight, in the order in memory that its readers want: compiled convolutions copy others at each call."""
    if not any(user.target is aten.conv2d.default for user in weight.users):
        return weight
    with model.graph.inserting_after(weight):
        ordered = model.graph.call_function(aten.clone.default, (weight,), {"memory_format": torch.channels_last})
    set_value(ordered)
    weight.replace_all_uses_with(ordered, delete_user_cb=lambda user: user is not ordered)
    return ordered


def _use_plain_product(model: GraphModule, packed: Node) -> Node:
    """Replace a `linear_mx`; gives the node of its dequantized weight."""
    x, data, scale, bias, element, block_size = packed.args
    with model.graph.inserting_before(packed):
        weight = model.graph.call_function(
            ops.dequantize_mx, (data, scale, element, block_size, dtype_of(packed), -1, shape_of(x)[-1])
        )
        plain = model.graph.call_function(aten.linear.default, (x, weight, bias))
    set_value(weight)
    plain.meta.update(packed.meta)
    packed.replace_all_uses_with(plain)
    model.graph.erase_node(packed)
    return weight
