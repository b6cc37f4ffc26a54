"""Dequantize packed weights once, into float buffers, and multiply by those: by torch's matmuls, or by a GPU's bfloat16
tensor cores."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.constants import computed_from, constant_nodes, evaluate, root_name
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import Dequantize, Hadamard, LinearMX, dtype_of, insert_before, insert_call, shape_of, value_of
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.fold_weights import fold_constant
from pt2mx.kernels.select import supports
from pt2mx.ops.attention import MatmulBfloat16

aten = torch.ops.aten


@graph_pass((LinearMX, Dequantize))
def unpack_weights(model: GraphModule) -> None:
    """Dequantize every weight to a buffer `<weight>_data_unpacked`, once for all of its users: `linear_mx` becomes
    `linear`, and convolutions and other users of a `dequantize_mx` read the buffer.

    The weights of embeddings, of `grouped_linear_mx` and of subgraphs stay packed. So do weights of matmuls that this
    machine's bfloat16 matrix instructions compute faster.
    """
    constants = {n for n in constant_nodes(model.graph) if all(c.op != "placeholder" for c in computed_from(n))}
    buffers: dict[tuple[object, ...], Node] = {}
    for node, matmul in LinearMX.calls_in(model.graph):
        k = (shape_of(matmul.x) or (None,))[-1]
        read = [n for n in (matmul.codes, matmul.scale, matmul.tensor_scale) if n is not None]
        if not constants.issuperset(read) or not isinstance(k, int):
            continue
        if matmul.target_dtype is None or not supports("multiply by packed weights", value_of(node), matmul.spec, k):
            constants.add(use_plain_matmul(model, node, matmul, k))
    for node, call in Dequantize.calls_in(model.graph):
        if node in constants:
            axis = call.spec.axis % evaluate(model, call.codes).dim()
            weight = call.replace(spec=call.spec.replace(axis=axis), length=None), shape_of(node) or call.length
            if weight not in buffers:
                buffers[weight] = fold_constant(model, node, f"{root_name(node)}_unpacked")
            node.replace_all_uses_with(buffers[weight])
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()


def use_plain_matmul(model: GraphModule, packed: Node, call: LinearMX, k: int) -> Node:
    """Replace a `linear_mx`, whose x is (..., k), and return the node of its dequantized weight."""
    if _is_of_tensor_cores(packed, call):
        return _use_tensor_cores(packed, call, k)
    weight = insert_call(packed, call.dequantization(value_of(packed).dtype, k))
    x = call.x
    if call.rotation:
        x = insert_call(packed, Hadamard(x, call.rotation, -1))
    if dtype_of(x) != dtype_of(packed):
        x = insert_before(packed, aten.to.dtype, x, dtype_of(packed))
    with model.graph.inserting_before(packed):
        plain = model.graph.call_function(aten.linear.default, (x, weight, call.bias))
    replace_node(packed, plain)
    return weight


def _is_of_tensor_cores(packed: Node, call: LinearMX) -> bool:
    """Return whether a GPU matmul takes bfloat16, returns float32, and has known sizes, which reshaping x to two
    dimensions needs."""
    known = all(isinstance(n, int) for n in shape_of(packed) or (None,))
    if not known or call.target_dtype != torch.float32 or dtype_of(call.x) != torch.bfloat16:
        return False
    return supports("multiply x and weights rounded to bfloat16", value_of(packed))


def _use_tensor_cores(packed: Node, call: LinearMX, k: int) -> Node:
    """Replace a `linear_mx` by a bfloat16 matmul with a float32 result, and return the node of its dequantized
    weight."""
    weight = insert_call(packed, call.dequantization(torch.bfloat16, k))
    rows = insert_before(packed, aten.reshape.default, call.x, [-1, k])
    columns = insert_before(packed, aten.t.default, weight)
    matmul = insert_call(packed, MatmulBfloat16(rows, columns, torch.float32))
    plain = insert_before(packed, aten.view.default, matmul, list(shape_of(packed) or ()))
    if call.bias is not None:
        plain = insert_before(packed, aten.add.Tensor, plain, call.bias)
    replace_node(packed, plain)
    return weight
