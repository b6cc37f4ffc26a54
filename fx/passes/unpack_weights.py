"""Dequantize weights once, at lowering time: this takes more memory and less time."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import computed_from, constant_nodes, evaluate, root_name
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import Dequantize, LinearMX, dtype_of, set_value, shape_of, value_of
from pt2mx.fx.passes.fold_weights import fold_constant
from pt2mx.kernels.cpu.linear import has_isa
from pt2mx.ops.bf16_matmul import matmul_bfloat16
from pt2mx.ops.hadamard import hadamard
from pt2mx.spec import MXSpec

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
        if not constants.issuperset((matmul.codes, matmul.scale)) or not isinstance(k, int):
            continue
        is_bfloat16 = matmul.target_dtype is not None and value_of(node).device.type == "cpu"
        if not is_bfloat16 or not has_isa(MXSpec(matmul.element, matmul.block_size), k):
            constants.add(_use_plain_matmul(model, node, matmul, k))
    for node, call in Dequantize.calls_in(model.graph):
        if node in constants:
            axis = call.axis % evaluate(model, call.codes).dim()
            weight = call.replace(axis=axis, length=None), shape_of(node) or call.length
            if weight not in buffers:
                buffers[weight] = fold_constant(model, node, f"{root_name(node)}_unpacked")
            node.replace_all_uses_with(buffers[weight])
            model.graph.erase_node(node)
    model.graph.eliminate_dead_code()


def _use_plain_matmul(model: GraphModule, packed: Node, call: LinearMX, k: int) -> Node:
    """Replace a `linear_mx`, whose x is (..., k), and return the node of its dequantized weight."""
    if _is_of_tensor_cores(packed, call):
        return _use_tensor_cores(model, packed, call, k)
    args = (call.codes, call.scale, call.element, call.block_size, dtype_of(packed), -1, k)
    with model.graph.inserting_before(packed):
        weight = model.graph.call_function(ops.dequantize_mx, args)
        x = call.x
        if call.rotation:
            x = model.graph.call_function(hadamard, (x, call.rotation, -1))
            set_value(x)
        if dtype_of(x) != dtype_of(packed):
            x = model.graph.call_function(aten.to.dtype, (x, dtype_of(packed)))
            set_value(x)
        plain = model.graph.call_function(aten.linear.default, (x, weight, call.bias))
    set_value(weight)
    plain.meta.update(packed.meta)
    packed.replace_all_uses_with(plain)
    model.graph.erase_node(packed)
    return weight


def _is_of_tensor_cores(packed: Node, call: LinearMX) -> bool:
    """Return whether a GPU matmul takes bfloat16, returns float32, and has known sizes, which reshaping x to two
    dimensions needs."""
    value, shape = value_of(packed), shape_of(packed) or (None,)
    known = all(isinstance(n, int) for n in shape)
    return known and call.target_dtype == torch.float32 and dtype_of(call.x) == torch.bfloat16 and value.is_cuda


def _use_tensor_cores(model: GraphModule, packed: Node, call: LinearMX, k: int) -> Node:
    """Replace a `linear_mx` by a bfloat16 matmul with a float32 result, and return the node of its dequantized
    weight."""

    def insert(target: OpOverload, *args: Any) -> Node:
        node = model.graph.call_function(target, args)
        set_value(node)
        return node

    with model.graph.inserting_before(packed):
        weight = insert(ops.dequantize_mx, call.codes, call.scale, call.element, call.block_size, torch.bfloat16, -1, k)
        rows = insert(aten.reshape.default, call.x, [-1, k])
        matmul = insert(matmul_bfloat16, rows, insert(aten.t.default, weight), torch.float32)
        plain = insert(aten.view.default, matmul, list(shape_of(packed) or ()))
        if call.bias is not None:
            plain = insert(aten.add.Tensor, plain, call.bias)
    plain.meta.update(packed.meta)
    packed.replace_all_uses_with(plain)
    model.graph.erase_node(packed)
    return weight
