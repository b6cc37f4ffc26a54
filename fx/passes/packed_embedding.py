"""Rows of a packed weight are gathered before they are dequantized: an embedding decodes what it looks up alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import Dequantize, dtype_of, make_positional, set_value, shape_of
from pt2mx.fx.graph.qdq import PROVENANCE_KEYS, SPEC_KEY
from pt2mx.fx.graph.tensors import erase_unread

aten = torch.ops.aten


def _is_first_index(indices: list[Node | None]) -> bool:
    return len(indices) == 1 and dtype_of(indices[0]) in (torch.int32, torch.int64)


#: operator -> whether a call of it, by its arguments after the tensor, gathers along the first dimension
_GATHERS: dict[object, Callable[..., bool]] = {
    aten.embedding.default: lambda indices, *hints: True,
    aten.index_select.default: lambda dim, index: dim == 0,
    aten.index.Tensor: _is_first_index,
}


@GraphPass
def use_packed_embeddings(model: GraphModule) -> None:
    """Make every gather of a dequantized weight's rows one of its codes and scales, and dequantize those rows: the same
    bits, where blocks run along the rows. The codes stay one buffer, whatever else reads them."""
    written = written_nodes(model.graph)
    for gather in [node for node in model.graph.nodes if node.target in _GATHERS]:
        dequantize = gather.args[0]
        if dequantize.target is not ops.dequantize_mx or not _gathers_whole_blocks(gather, dequantize):
            continue
        of = Dequantize.of(dequantize)
        packed = of.codes, of.scale
        if not written.isdisjoint((dequantize, *packed)):
            continue
        axis = of.axis % len(shape_of(dequantize)) + len(shape_of(gather)) - len(shape_of(dequantize))
        with model.graph.inserting_before(gather):
            rows = [model.graph.call_function(gather.target, (n, *gather.args[1:])) for n in packed]
            args = of._replace(codes=rows[0], scale=rows[1], axis=axis)
            gathered = model.graph.call_function(ops.dequantize_mx, tuple(args))
        for node in rows:
            node.meta.update({key: gather.meta[key] for key in PROVENANCE_KEYS if key in gather.meta})
            set_value(node)
        gathered.meta.update(gather.meta)
        if SPEC_KEY in dequantize.meta:
            gathered.meta[SPEC_KEY] = dequantize.meta[SPEC_KEY].replace(axis=axis)
        gather.replace_all_uses_with(gathered)
        erase_unread(gather)


def _gathers_whole_blocks(gather: Node, dequantize: Node) -> bool:
    make_positional(gather)
    shape = shape_of(dequantize)
    if shape is None or shape_of(gather) is None or gather.kwargs:
        return False
    return Dequantize.of(dequantize).axis % len(shape) != 0 and _GATHERS[gather.target](*gather.args[1:])
