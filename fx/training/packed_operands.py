"""Train beside packed weights: operators that read codes keep no float weight for their backward pass, which
dequantizes the codes again; and the way back to the operators of a converted graph."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.graph_pass import run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import (
    Dequantize,
    FakeQuantize,
    GroupedLinearMX,
    LinearMX,
    args_of,
    function_of,
    insert_before,
    insert_call,
    operator_of,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.qdq import SPEC_KEY, insert_quantize_dequantize, spec_of_dequantize
from pt2mx.fx.graph.tensors import delete_unused_tensors, erase_unused
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq
from pt2mx.fx.passes.packed_operands import GATHERS, use_packed_embeddings, use_packed_weights
from pt2mx.fx.passes.unpack_weights import use_plain_matmul
from pt2mx.fx.passes.weight_layout import make_weights_k_major

aten = torch.ops.aten


def use_packed_operators(model: GraphModule) -> None:
    """Make matmuls and embeddings read codes, and quantize each activation by one operator. Matmuls have the spec of
    their weight in their meta. Changes `model`."""
    fold_all_weights(model)
    for graph in graph_modules(model):
        run_passes(graph, (cse_quantize, fuse_qdq, make_weights_k_major, use_packed_embeddings))
        specs = {call.codes: spec_of_dequantize(node) for node, call in Dequantize.calls_in(graph.graph)}
        run_passes(graph, (use_packed_weights,))
        for operator in (LinearMX, GroupedLinearMX):
            for node, call in operator.calls_in(graph.graph):
                node.meta[SPEC_KEY] = specs.get(call.codes, call.spec)
    delete_unused_tensors(model)


def use_converted_operators(model: GraphModule) -> None:
    """Undo `use_packed_operators`. Changes `model`."""
    for graph in graph_modules(model):
        for node, call in LinearMX.calls_in(graph.graph):
            weight = use_plain_matmul(graph, node, call, value_of(call.x).shape[-1])
            weight.meta[SPEC_KEY] = node.meta.get(SPEC_KEY, call.spec)
        for node, grouped in GroupedLinearMX.calls_in(graph.graph):
            _use_plain_grouped_mm(node, grouped)
        for node, gathered in Dequantize.calls_in(graph.graph):
            _gather_values(node, gathered)
        for node, quantized in FakeQuantize.calls_in(graph.graph):
            pair = insert_quantize_dequantize(quantized.x, quantized.spec, node, quantized.tensor_scale)
            node.replace_all_uses_with(pair)
            graph.graph.erase_node(node)
        graph.recompile()


def _use_plain_grouped_mm(node: Node, call: GroupedLinearMX) -> None:
    weight = insert_call(node, call.dequantization(value_of(node).dtype, value_of(call.x).shape[-1]))  # (E, N, K)
    weight.meta[SPEC_KEY] = node.meta.get(SPEC_KEY, call.spec)
    columns = insert_before(node, aten.transpose.int, weight, 1, 2)
    node.replace_all_uses_with(insert_before(node, aten._grouped_mm.default, call.x, columns, call.offs))
    node.graph.erase_node(node)


def _gather_values(node: Node, call: Dequantize) -> None:
    """Gather rows of a dequantized weight where a node dequantizes gathered rows of codes."""
    gather = call.codes
    if gather.target not in GATHERS or operator_of(gather) is not call.scale.target:
        return
    table, *index = args_of(gather)
    rank, gathered = len(shape_of(table) or ()), len(shape_of(node) or ())
    axis = call.spec.axis % gathered - gathered + rank
    codes = call.replace(codes=table, scale=args_of(call.scale)[0], spec=call.spec.replace(axis=axis))
    values = insert_call(node, codes)
    if SPEC_KEY in node.meta:
        values.meta[SPEC_KEY] = node.meta[SPEC_KEY].replace(axis=axis)
    node.replace_all_uses_with(insert_before(node, function_of(gather), values, *index))
    erase_unused(node)
