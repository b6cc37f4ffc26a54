"""One `fake_quantize_mx` for each quantized activation: fuse its pair, and merge quantizations of equal or adjacent
values."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import is_view, written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.memory_order import SPLITTING, allow_any_strides
from pt2mx.fx.graph.node import (
    Dequantize,
    FakeQuantize,
    Quantize,
    args_of,
    attribute_of,
    dtype_of,
    node_arg,
    set_value,
    shape_of,
)
from pt2mx.fx.graph.qdq import quantize_of
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.modes import ROUNDINGS
from pt2mx.ops import linear

aten = torch.ops.aten
#: operators that may use the slices: their results' strides do not depend on the slices being quantized together
_USERS = (
    aten.matmul.default, aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
    aten.addmm.default, linear.linear_mx, aten.scaled_dot_product_attention.default,
)  # fmt: skip


@graph_pass(Quantize, Dequantize)
def fuse_qdq(model: GraphModule) -> None:
    """Replace every pair by a `fake_quantize_mx`, which computes the same bits.

    The pass skips codes that something else uses, and pairs whose ends differ in format, blocks, dtype or shape. The
    new node takes the position of `quantize_mx`: later writes to the tensor do not reach it, and stochastic roundings
    draw their numbers in the same order.
    """
    for dequantize, pair in Dequantize.calls_in(model.graph):
        quantize = quantize_of(dequantize)
        if quantize is None or not _is_read_once(quantize, dequantize, pair):
            continue
        quantization = Quantize.expect(quantize)
        if (pair.dtype, shape_of(dequantize)) != (dtype_of(quantization.x), shape_of(quantization.x)):
            continue
        with model.graph.inserting_before(quantize):
            fused = model.graph.call_function(ops.fake_quantize_mx, _fake_quantize(quantization).args)
        replace_node(dequantize, fused)


def _fake_quantize(call: Quantize) -> FakeQuantize:
    """Return the call of `fake_quantize_mx` that gives the values of codes."""
    return FakeQuantize(call.x, call.spec, call.seed, "identity", call.tensor_scale)


def _is_read_once(quantize: Node, dequantize: Node, pair: Dequantize) -> bool:
    """Return whether only `dequantize` uses the codes and scales of its pair."""
    return set(quantize.users) == {pair.codes, pair.scale} and {*pair.codes.users, *pair.scale.users} == {dequantize}


_SHARED = (ops.quantize_mx, ops.fake_quantize_mx, ops.dequantize_mx, ops.tensor_scale_mx)


@graph_pass((Quantize, FakeQuantize, Dequantize))
def cse_quantize(model: GraphModule) -> None:
    """Replace equal quantizations of one tensor by the first.

    The pass skips stochastic roundings without a seed, since each draws its own numbers, and memory that the graph
    writes.
    """
    written = written_nodes(model.graph)
    first: dict[str, Node] = {}
    for node in list(model.graph.nodes):
        args = _shared_args(node) if written.isdisjoint((node, *node.all_input_nodes)) else None
        if args is None:
            continue
        # a parameter or buffer by its identity, since a tied weight has two names
        read = {a: id(attribute_of(model, a)) for a in args if isinstance(a, Node) and a.op == "get_attr"}
        kept = first.setdefault(repr((node.target, [read.get(a, a) for a in args])), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            model.graph.erase_node(node)


def _shared_args(node: Node) -> tuple[Any, ...] | None:
    """Return all arguments of a node if the nodes that have the same ones have its value; else None."""
    if node.target is operator.getitem:
        source = node.args[0]
        return node.args if isinstance(source, Node) and source.target is ops.quantize_mx else None
    if node.target not in _SHARED:
        return None
    quantization = Quantize.of(node) or FakeQuantize.of(node)
    if quantization is not None:
        draws = ROUNDINGS[quantization.spec.rounding].random and quantization.seed is None
        return None if draws else quantization.args
    dequantization = Dequantize.of(node)
    return node.args if dequantization is None else dequantization.args


class Slice(NamedTuple):
    """A quantization of the columns `start` to `end` of a tensor's last dimension, and the views from the tensor to the
    quantization's input."""

    quantize: Node
    views: list[Node]
    start: int
    end: int

    @property
    def source(self) -> Node:
        """The tensor."""
        return node_arg(self.views[0])


@graph_pass(FakeQuantize, aten.slice.Tensor)
def merge_fake_quantize(model: GraphModule) -> None:
    """Merge the quantizations of adjacent slices of a tensor's last dimension that have the same element, block size
    and modes, and E8M0 scales. The slices become views of the quantized tensor, with the same bits.

    Blocks must run along that dimension, no block may cross the end of a slice or a head, and only matmuls may use the
    slices.
    """
    written = written_nodes(model.graph)
    groups: dict[FakeQuantize, list[Slice]] = defaultdict(list)
    for node, call in FakeQuantize.calls_in(model.graph):
        part = _part(node, call)
        if part is None or not call.spec.has_plain_scale or not written.isdisjoint((node, *part.views, part.source)):
            continue
        if not ROUNDINGS[call.spec.rounding].random and _only_matmuls_use(node):
            groups[call.replace(x=part.source, spec=call.spec.replace(axis=-1))].append(part)
    for call, parts in groups.items():
        for run in _adjacent(parts):
            _quantize(model, call, run)


def _part(quantize: Node, call: FakeQuantize) -> Slice | None:
    """Return the columns that a node quantizes, if they are a slice of the last dimension.

    The slice may be split into heads if the width of a head stays the last dimension.
    """
    node, shape = call.x, shape_of(call.x)
    views: list[Node] = []
    if shape is None or call.spec.axis % len(shape) != len(shape) - 1:
        return None
    while shape is not None and len(node.users) == 1:
        views.insert(0, node)
        if not _is_whole(shape[-1], call.spec.block_size):
            return None
        if node.target is aten.slice.Tensor:
            columns = _columns(node)
            return Slice(quantize, views, *columns) if columns and columns[0] % call.spec.block_size == 0 else None
        if not _keeps_last(node, shape):
            return None
        node = node_arg(node)
        shape = shape_of(node)
    return None


def _is_whole(length: int | str, block_size: int) -> bool:
    return isinstance(length, int) and length % block_size == 0


def _columns(node: Node) -> tuple[int, int] | None:
    """Return the start and end of a slice of the last dimension with step 1; None for other slices."""
    source, dim, start, end, *step = node.args if len(node.args) >= 4 else (None,) * 4
    shape = shape_of(source)
    if shape is None or not isinstance(dim, int) or dim % len(shape) != len(shape) - 1:
        return None
    if step not in ([], [1]) or node.kwargs:
        return None
    length = shape[-1]
    if not (isinstance(length, int) and isinstance(start, int) and isinstance(end, int)):
        return None
    return (start, min(end, length)) if 0 <= start < min(end, length) else None


def _keeps_last(node: Node, shape: tuple[int | str, ...]) -> bool:
    """Return whether a view only permutes dimensions before the last, or splits the last one."""
    args = args_of(node)
    if node.target is aten.transpose.int:
        return len(shape) - 1 not in [dim % len(shape) for dim in args[1:3]]
    if node.target is aten.permute.default:
        return args[1][-1] % len(shape) == len(shape) - 1
    return node.target in SPLITTING and shape[:-2] == (shape_of(args[0]) or ())[:-1]


def _only_matmuls_use(node: Node) -> bool:
    """Return whether only matmuls use a node, directly or through views."""
    return all(user.target in _USERS or (is_view(user) and _only_matmuls_use(user)) for user in node.users)


def _adjacent(parts: list[Slice]) -> list[list[Slice]]:
    """Return the runs of two or more slices that follow one another."""
    runs: list[list[Slice]] = []
    for part in sorted(parts, key=lambda p: (p.start, p.end)):
        if runs and runs[-1][-1].end == part.start:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run for run in runs if len(run) > 1]


def _quantize(model: GraphModule, call: FakeQuantize, parts: list[Slice]) -> None:
    """Quantize a run of adjacent slices by `call`, whose x is the whole tensor."""
    source, dim = args_of(parts[0].views[0])[:2]
    start, end = parts[0].start, parts[-1].end
    earliest = min((part.views[0] for part in parts), key=list(model.graph.nodes).index)
    inserted: list[Node] = []
    with model.graph.inserting_before(earliest):
        if (start, end) != (0, (shape_of(source) or ())[-1]):
            source = model.graph.call_function(aten.slice.Tensor, (source, dim, start, end))
            inserted.append(source)
        together = model.graph.call_function(ops.fake_quantize_mx, call.replace(x=source).args)
    for node in (*inserted, together):
        node.meta.update({k: v for k, v in parts[0].quantize.meta.items() if k != "val"})
        set_value(node)
    for part in parts:
        part.views[0].args = (together, dim, part.start - start, part.end - start)
        part.quantize.replace_all_uses_with(part.views[-1])
        model.graph.erase_node(part.quantize)
        set_value(part.views[0])
        allow_any_strides(part.views[0])
