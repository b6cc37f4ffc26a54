"""Gather the packed rows of an embedding, then dequantize only these rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    Dequantize,
    dtype_of,
    function_of,
    make_positional,
    node_arg,
    operator_of,
    set_value,
    shape_of,
)
from pt2mx.fx.graph.qdq import PROVENANCE_KEYS, SPEC_KEY
from pt2mx.fx.graph.tensors import erase_unused

aten = torch.ops.aten


def _is_first_index(indices: list[Node | None]) -> bool:
    return len(indices) == 1 and dtype_of(indices[0]) in (torch.int32, torch.int64)


#: operator -> a function of its arguments after the tensor: whether the call gathers along the first dimension
_GATHERS: dict[OpOverload, Callable[..., bool]] = {
    aten.embedding.default: lambda indices, *hints: True,
    aten.index_select.default: lambda dim, index: dim == 0,
    aten.index.Tensor: _is_first_index,
}


@graph_pass(tuple(_GATHERS), Dequantize)
def use_packed_embeddings(model: GraphModule) -> None:
    """Gather the rows of codes and scales instead of rows of the dequantized weight, and dequantize the result.

    The bits stay the same, because blocks run along the rows. Other users still read the same buffer of codes.
    """
    written = written_nodes(model.graph)
    for gather in [node for node in model.graph.nodes if node.target in _GATHERS]:
        dequantize = node_arg(gather)
        call = Dequantize.of(dequantize)
        axis = None if call is None else _gathered_axis(gather, dequantize, call)
        if call is None or axis is None or not written.isdisjoint((dequantize, call.codes, call.scale)):
            continue
        index_args = gather.args[1:]
        with model.graph.inserting_before(gather):
            codes = model.graph.call_function(function_of(gather), (call.codes, *index_args))
            scale = model.graph.call_function(function_of(gather), (call.scale, *index_args))
            args = call.replace(codes=codes, scale=scale, axis=axis).args
            gathered = model.graph.call_function(ops.dequantize_mx, args)
        for node in (codes, scale):
            node.meta.update({key: gather.meta[key] for key in PROVENANCE_KEYS if key in gather.meta})
            set_value(node)
        gathered.meta.update(gather.meta)
        if SPEC_KEY in dequantize.meta:
            gathered.meta[SPEC_KEY] = dequantize.meta[SPEC_KEY].replace(axis=axis)
        gather.replace_all_uses_with(gathered)
        erase_unused(gather)


def _gathered_axis(gather: Node, dequantize: Node, call: Dequantize) -> int | None:
    """Return the dimension of the gathered rows along which blocks run; None if the gather would split blocks."""
    make_positional(gather)
    shape, gathered = shape_of(dequantize), shape_of(gather)
    if shape is None or gathered is None or gather.kwargs:
        return None
    axis = call.axis % len(shape)
    keeps_blocks = axis != 0 and _GATHERS[operator_of(gather)](*gather.args[1:])
    return axis + len(gathered) - len(shape) if keeps_blocks else None
