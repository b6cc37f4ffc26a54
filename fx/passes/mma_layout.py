"""Repack weights into the MMA layout once, at lowering time."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.formats import ELEMENTS
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import LinearMX, dtype_of, name_of, register_buffer, shape_of, tensor_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.kernels.gpu.mma_layout import to_mma_layout
from pt2mx.kernels.select import runs_triton
from pt2mx.ops import linear


@graph_pass(LinearMX)
def use_mma_layout(model: GraphModule, everywhere: bool = False) -> None:
    """Replace `linear_mx` of bfloat16 by `linear_mx_mma_layout`, which reads its weight in the MMA layout.

    The codes and scales become buffers `<weight>_data_mma` and `<weight>_scale_mma`. The old buffers stay if something
    else uses them, such as the embedding of a tied weight. The pass skips linear layers on other devices (unless
    `everywhere`), weights that are inputs or that the layout cannot represent (`to_mma_layout`), and a K that 8 does
    not divide.
    """
    constants = constant_nodes(model.graph)
    buffers: dict[tuple[object, ...], list[str]] = {}
    for node, call in LinearMX.calls_in(model.graph):
        if not all(n.op == "get_attr" and n in constants for n in (call.codes, call.scale)) or not _fits(call):
            continue
        codes = tensor_of(model, call.codes)
        if not everywhere and not (codes.device.type == "cuda" and runs_triton(codes.device)):
            continue
        key = call.codes.target, call.scale.target, call.element, call.block_size
        if key not in buffers:
            buffers[key] = _register_mma_layout(model, call)
        if buffers[key]:
            _replace(model, node, call, buffers[key])


def _fits(call: LinearMX) -> bool:
    k = (shape_of(call.x) or (None,))[-1]
    return dtype_of(call.x) == torch.bfloat16 and call.target_dtype is None and isinstance(k, int) and k % 8 == 0


def _register_mma_layout(model: GraphModule, call: LinearMX) -> list[str]:
    """Register buffers of a weight's codes and scales and return their names; none where the layout cannot represent
    the weight."""
    read = call.codes, call.scale
    codes, scale = (tensor_of(model, n) for n in read)
    repacked = to_mma_layout(codes, scale, ELEMENTS[call.element], call.block_size)
    if repacked is None:
        return []
    return [register_buffer(model, f"{name_of(n)}_mma", value) for n, value in zip(read, repacked, strict=True)]


def _replace(model: GraphModule, node: Node, call: LinearMX, names: list[str]) -> None:
    rows = len(tensor_of(model, call.codes))
    with model.graph.inserting_before(node):
        read = [model.graph.get_attr(name) for name in names]
        args = (call.x, *read, call.bias, call.element, rows, call.rotation)
        new = model.graph.call_function(linear.linear_mx_mma_layout, args)
    for buffer, old in zip(read, (call.codes, call.scale), strict=True):
        buffer.meta.update(old.meta)
        if "val" in old.meta:
            buffer.meta["val"] = old.meta["val"].new_empty(tensor_of(model, buffer).shape)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    erase_unused(node)
