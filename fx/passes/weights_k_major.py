"""Store the packed weights of matmuls with their blocks along the last dimension, contiguous in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import Dequantize, name_of, register_buffer, set_value, tensor_of
from pt2mx.fx.graph.qdq import SPEC_KEY
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.fx.graph.views import allow_any_strides, may_be_ordered_as
from pt2mx.fx.passes.packed_matmuls import weights_of_matmuls


@graph_pass(Dequantize)
def make_weights_k_major(model: GraphModule) -> None:
    """Transpose the codes and scales of matmul weights whose blocks run along another dimension than the last.

    The matmul must reduce that dimension. It is not the last in `x @ w` and Hugging Face's Conv1D, and not the last in
    memory in the transpose of a parameter.

    The transposed tensors become buffers `<weight>_data_t` and `<weight>_scale_t`. A transposition after
    `dequantize_mx` restores the old shape and bits for every user. The pass skips weights with another user that
    depends on the order of dimensions in memory, and weights of subgraphs, which are operands.
    """
    constants = constant_nodes(model.graph)
    axes: dict[Node, tuple[int, int]] = {}
    for _, matmul, weight in weights_of_matmuls(model):
        last = len(weight.dims) - 1
        swap = {weight.axis: last, last: weight.axis}
        transposed = tuple(swap.get(d, d) for d in weight.dims)
        call = Dequantize.expect(weight.dequantize)
        is_constant = all(n.op == "get_attr" and n in constants for n in (call.codes, call.scale))
        if transposed == matmul.dims and is_constant and _is_new_order(model, weight.dequantize, weight.axis):
            axes[weight.dequantize] = (weight.axis, last)
    for dequantize, dims in axes.items():
        _transpose(model, dequantize, *dims)


def _is_new_order(model: GraphModule, dequantize: Node, axis: int) -> bool:
    """Return whether the codes need a transposition to have their blocks last in memory, and all users support that
    order."""
    codes = tensor_of(model, Dequantize.expect(dequantize).codes)
    if codes.transpose(axis, -1).is_contiguous():
        return axis != codes.dim() - 1
    value = dequantize.meta.get("val")
    return value is not None and may_be_ordered_as(dequantize, _transposed(value, axis).transpose(axis, -1))


def _transpose(model: GraphModule, dequantize: Node, axis: int, last: int) -> None:
    call = Dequantize.expect(dequantize)
    with model.graph.inserting_before(dequantize):
        codes, scale = (_transposed_buffer(model, buffer, axis) for buffer in (call.codes, call.scale))
        args = call.replace(codes=codes, scale=scale, axis=last).args
        blocks_last = model.graph.call_function(ops.dequantize_mx, args)
        back = model.graph.call_function(torch.ops.aten.transpose.int, (blocks_last, axis, last))
    for new in (blocks_last, back):
        new.meta.update(dequantize.meta)
        set_value(new)
    if SPEC_KEY in dequantize.meta:
        blocks_last.meta[SPEC_KEY] = dequantize.meta[SPEC_KEY].replace(axis=last)
        del back.meta[SPEC_KEY]
    dequantize.replace_all_uses_with(back)
    allow_any_strides(back)
    erase_unused(dequantize)


def _transposed(x: Tensor, axis: int) -> Tensor:
    return x.transpose(axis, -1).contiguous()


def _transposed_buffer(model: GraphModule, node: Node, axis: int) -> Node:
    """Register the transposed buffer that a node reads, and return the node that reads it."""
    value = _transposed(tensor_of(model, node), axis)
    buffer = model.graph.get_attr(register_buffer(model, f"{name_of(node)}_t", value))
    buffer.meta.update(node.meta)
    if "val" in node.meta:
        buffer.meta["val"] = _transposed(node.meta["val"], axis)
    return buffer
