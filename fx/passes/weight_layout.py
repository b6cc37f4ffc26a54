"""Store packed weights in the order in which kernels read them: blocks last in memory, or the MMA layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.memory_order import accepts_order_of, allow_any_strides
from pt2mx.fx.graph.node import (
    Dequantize,
    LinearMX,
    LinearMXMMALayout,
    dtype_of,
    name_of,
    read_instead,
    register_buffer,
    set_value,
    shape_of,
    tensor_of,
)
from pt2mx.fx.graph.qdq import SPEC_KEY
from pt2mx.fx.graph.tensors import erase_unused, replace_node
from pt2mx.fx.passes.packed_operands import weights_of_matmuls
from pt2mx.kernels.gpu.mma_layout import to_mma_layout
from pt2mx.kernels.select import supports


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
    return value is not None and accepts_order_of(dequantize, _transposed(value, axis).transpose(axis, -1))


def _transpose(model: GraphModule, dequantize: Node, axis: int, last: int) -> None:
    call = Dequantize.expect(dequantize)
    with model.graph.inserting_before(dequantize):
        codes, scale = (_transposed_buffer(model, buffer, axis) for buffer in (call.codes, call.scale))
        args = call.replace(codes=codes, scale=scale, spec=call.spec.replace(axis=last)).args
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
    return read_instead(model, register_buffer(model, f"{name_of(node)}_t", value), node)


@graph_pass(LinearMX)
def use_mma_layout(model: GraphModule) -> None:
    """Replace `linear_mx` of bfloat16 by `linear_mx_mma_layout`, which reads its weight in the MMA layout.

    The codes and scales become buffers `<weight>_data_mma` and `<weight>_scale_mma`. The old buffers stay if something
    else uses them, such as the embedding of a tied weight. The pass skips linear layers on other devices, E4M3 on GPUs
    that cannot convert it, weights that are inputs or that the layout cannot represent (`to_mma_layout`), and a K that
    8 does not divide.
    """
    constants = constant_nodes(model.graph)
    buffers: dict[tuple[object, ...], list[str]] = {}
    for node, call in LinearMX.calls_in(model.graph):
        if not has_mma_layout(model, call, constants):
            continue
        key = call.codes.target, call.scale.target, call.spec
        if key not in buffers:
            buffers[key] = _register_mma_layout(model, call)
        if buffers[key]:
            _replace(model, node, call, buffers[key])


def has_mma_layout(model: GraphModule, call: LinearMX, constants: set[Node]) -> bool:
    """Return whether `use_mma_layout` takes a call, unless the layout cannot represent its weight."""
    if any(n.op != "get_attr" or n not in constants for n in (call.codes, call.scale)):
        return False
    if not _supports_mma_layout(call):
        return False
    codes = tensor_of(model, call.codes)
    return supports("multiply weights in the MMA layout", codes, call.spec.element.name)


def _supports_mma_layout(call: LinearMX) -> bool:
    k = (shape_of(call.x) or (None,))[-1]
    is_bfloat16 = dtype_of(call.x) == torch.bfloat16 and call.target_dtype is None
    is_multiplied = not call.spec.divides_by_tensor_scale and call.spec.block_rows == 1
    return is_bfloat16 and isinstance(k, int) and k % 8 == 0 and is_multiplied


def _register_mma_layout(model: GraphModule, call: LinearMX) -> list[str]:
    """Register buffers of a weight's codes and scales and return their names; none where the layout cannot represent
    the weight."""
    read = call.codes, call.scale
    codes, scale = (tensor_of(model, n) for n in read)
    repacked = to_mma_layout(codes, scale, call.spec)
    if repacked is None:
        return []
    return [register_buffer(model, f"{name_of(n)}_mma", value) for n, value in zip(read, repacked, strict=True)]


def _replace(model: GraphModule, node: Node, call: LinearMX, names: list[str]) -> None:
    rows = len(tensor_of(model, call.codes))
    with model.graph.inserting_before(node):
        read = zip(names, (call.codes, call.scale), strict=True)
        codes, scale = (read_instead(model, name, old) for name, old in read)
        element = call.spec.element.name
        reordered = call.as_call_of(LinearMXMMALayout, codes=codes, scale=scale, element=element, n=rows)
        new = model.graph.call_function(reordered.overload, reordered.args)
    replace_node(node, new)
