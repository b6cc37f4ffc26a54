"""Merge the linear layers of one input (queries, keys and values; gate and up projection) into one matmul with
concatenated weights; each result is a view of its slice.

A call costs a few microseconds, as long as the matmul of a small layer for one token.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.memory_order import accepts_any_strides, allow_any_strides
from pt2mx.fx.graph.node import LinearMX, name_of, read_instead, register_buffer, set_value, tensor_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.ops import linear

aten = torch.ops.aten

_TILE_ROWS = 16  # rows of a weight that kernels multiply together


@graph_pass(LinearMX, LinearMX)
def merge_linears(model: GraphModule) -> None:
    """Merge the `linear_mx` calls of the same x, element and block size whose weights and biases nothing else uses.

    Weights whose rows fill whole tiles are merged only with each other. The pass skips results that are outputs of the
    graph, that the graph writes, or whose users may require certain strides.
    """
    constants, written = constant_nodes(model.graph), written_nodes(model.graph)
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node, call in LinearMX.calls_in(model.graph):
        tensors = [n for n in (call.codes, call.scale, call.bias) if n is not None]
        is_constant = all(n.op == "get_attr" and n in constants and len(n.users) == 1 for n in tensors)
        if is_constant and written.isdisjoint((call.x, node)) and accepts_any_strides(node):
            in_tiles = len(tensor_of(model, call.codes)) % _TILE_ROWS == 0
            key = (
                call.x,
                call.rotation,
                call.target_dtype,
                *_scales(model, call),
                call.bias is None,
                in_tiles,
            )
            groups[key].append(node)
    for matmuls in groups.values():
        if len(matmuls) > 1:
            _merge(model, matmuls)


def _scales(model: GraphModule, call: LinearMX) -> tuple[object, ...]:
    """Return the arguments of scales that weights must share to be merged, with the value of a tensor scale. A weight
    whose blocks end past its last row shares them with no other."""
    t = call.tensor_scale
    if (t is not None and t.op != "get_attr") or len(tensor_of(model, call.codes)) % call.spec.block_rows:
        return (call,)
    return call.spec, None if t is None else float(tensor_of(model, t))


def _merge(model: GraphModule, matmuls: list[Node]) -> None:
    first, calls = matmuls[0], [LinearMX.expect(matmul) for matmul in matmuls]
    biases = [call.bias for call in calls if call.bias is not None]  # all have one, or none has
    with model.graph.inserting_before(first):
        whole = calls[0].replace(
            codes=_concatenated(model, [call.codes for call in calls]),
            scale=_concatenated(model, [call.scale for call in calls]),
            bias=_concatenated(model, biases) if biases else None,
        )
        merged = model.graph.call_function(linear.linear_mx, whole.args)
    merged.meta.update(first.meta)
    set_value(merged)
    start = 0
    for matmul, call in zip(matmuls, calls, strict=True):
        end = start + len(tensor_of(model, call.codes))
        with model.graph.inserting_before(first):
            part = model.graph.call_function(aten.slice.Tensor, (merged, -1, start, end))
        part.meta.update(matmul.meta)
        set_value(part)
        matmul.replace_all_uses_with(part)
        allow_any_strides(part)
        start = end
    for matmul in matmuls:
        erase_unused(matmul)


def _concatenated(model: GraphModule, nodes: list[Node]) -> Node:
    """Insert a read of a new buffer: the concatenated tensors."""
    value = torch.cat([tensor_of(model, node) for node in nodes])
    return read_instead(model, register_buffer(model, f"{name_of(nodes[0])}_joined", value), nodes[0])
