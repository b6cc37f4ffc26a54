"""Neighbouring parts of one tensor that are quantized alike are quantized together: queries and keys of an attention,
which are parts of one product."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import FakeQuantize, set_value, shape_of
from pt2mx.fx.graph.views import SPLITTING, allow_any_strides, is_view
from pt2mx.modes import ROUNDINGS
from pt2mx.ops import linear

aten = torch.ops.aten

#: what may read the parts: its results have strides of their own, or those that they had without quantization
_READERS = (
    aten.matmul.default, aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
    aten.addmm.default, linear.linear_mx, aten.scaled_dot_product_attention.default,
)  # fmt: skip


class Part(NamedTuple):
    """A quantization, and the nodes from the part of a tensor that it quantizes to its input, all views."""

    quantize: Node
    views: list[Node]

    @property
    def bounds(self) -> tuple[int, int]:
        source, _, start, end = self.views[0].args[:4]
        return start, min(end, shape_of(source)[-1])


@GraphPass
def merge_fake_quantize(model: GraphModule) -> None:
    """Let quantizations of neighbouring parts of a tensor's last dimension, with the same element, block size and
    modes, be one of all these parts, where blocks run along that dimension, none has values of two parts or heads, and
    products alone read them. What they give are views of it: the same bits."""
    written, groups = written_nodes(model.graph), defaultdict(list)
    for node in model.graph.find_nodes(op="call_function", target=ops.fake_quantize_mx):
        of, part = FakeQuantize.of(node), _part(node)
        if part is None or not written.isdisjoint((node, *part.views, part.views[0].args[0])):
            continue
        if not ROUNDINGS[of.rounding].random and _products_read(node):
            groups[part.views[0].args[0], of._replace(x=None, axis=-1)].append(part)
    for parts in groups.values():
        for neighbours in _neighbours(parts):
            _quantize(model, neighbours)


def _part(quantize: Node) -> Part | None:
    """What is quantized, if it is a part of the last dimension, maybe split into heads, with that dimension still the
    last."""
    node, _, block_size, axis, *_ = FakeQuantize.of(quantize)
    views: list[Node] = []
    if shape_of(node) is None or axis % len(shape_of(node)) != len(shape_of(node)) - 1:
        return None
    while isinstance(node, Node) and len(node.users) == 1 and shape_of(node) is not None:
        views.insert(0, node)
        if not _is_whole(shape_of(node)[-1], block_size):
            return None
        if node.target is aten.slice.Tensor:
            return Part(quantize, views) if _is_part(node, block_size) else None
        if not _keeps_last(node):
            return None
        node = node.args[0]
    return None


def _is_whole(length: object, block_size: int) -> bool:
    return isinstance(length, int) and length % block_size == 0


def _is_part(node: Node, block_size: int) -> bool:
    source, dim, start, end, *step = node.args if len(node.args) >= 4 else (None,) * 4
    shape = shape_of(source)
    if shape is None or not isinstance(shape[-1], int) or step not in ([], [1]) or node.kwargs:
        return False
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < min(end, shape[-1]):
        return False
    return dim % len(shape) == len(shape) - 1 and start % block_size == 0


def _keeps_last(node: Node) -> bool:
    """Whether a view puts other dimensions than the last in another order, or splits the last one."""
    shape = shape_of(node)
    if node.target is aten.transpose.int:
        return len(shape) - 1 not in [dim % len(shape) for dim in node.args[1:3]]
    if node.target is aten.permute.default:
        return node.args[1][-1] % len(shape) == len(shape) - 1
    return node.target in SPLITTING and shape[:-2] == (shape_of(node.args[0]) or ())[:-1]


def _products_read(node: Node) -> bool:
    return all(user.target in _READERS or (is_view(user) and _products_read(user)) for user in node.users)


def _neighbours(parts: list[Part]) -> list[list[Part]]:
    """The parts in order, those together that follow one another; alone ones are left out."""
    runs: list[list[Part]] = []
    for part in sorted(parts, key=lambda p: p.bounds):
        if runs and runs[-1][-1].bounds[1] == part.bounds[0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run for run in runs if len(run) > 1]


def _quantize(model: GraphModule, parts: list[Part]) -> None:
    first, (start, end) = parts[0].views[0], (parts[0].bounds[0], parts[-1].bounds[1])
    (source, dim), quantize = first.args[:2], parts[0].quantize
    earliest = min((part.views[0] for part in parts), key=list(model.graph.nodes).index)
    with model.graph.inserting_before(earliest):
        whole = model.graph.call_function(aten.slice.Tensor, (source, dim, start, end))
        args = FakeQuantize.of(quantize)._replace(x=whole, axis=-1)
        together = model.graph.call_function(ops.fake_quantize_mx, tuple(args))
    for node in (whole, together):
        node.meta.update({k: v for k, v in quantize.meta.items() if k != "val"})
        set_value(node)
    for part in parts:
        low, high = part.bounds
        part.views[0].args = (together, dim, low - start, high - start)
        part.quantize.replace_all_uses_with(part.views[-1])
        model.graph.erase_node(part.quantize)
        set_value(part.views[0])
        allow_any_strides(part.views[0])
