"""Quantize an activation once; fuse `quantize_mx -> getitem x2 -> dequantize_mx` into `fake_quantize_mx`."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import Dequantize, FakeQuantize, Quantize, attribute_of, dtype_of, shape_of
from pt2mx.fx.graph.qdq import quantize_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.modes import ROUNDINGS


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
            fused = model.graph.call_function(ops.fake_quantize_mx, (*quantization.args, "identity"))
        fused.meta.update(dequantize.meta)
        dequantize.replace_all_uses_with(fused)
        erase_unused(dequantize)


def _is_read_once(quantize: Node, dequantize: Node, pair: Dequantize) -> bool:
    """Return whether only `dequantize` uses the codes and scales of its pair."""
    return set(quantize.users) == {pair.codes, pair.scale} and {*pair.codes.users, *pair.scale.users} == {dequantize}


_SHARED = (ops.quantize_mx, ops.fake_quantize_mx, ops.dequantize_mx)


@graph_pass((Quantize, FakeQuantize, Dequantize))
def cse_quantize(model: GraphModule) -> None:
    """Replace equal quantizations of one tensor by the first.

    The pass skips stochastic roundings without a seed, since each draws its own numbers, and memory that the graph
    writes.
    """
    written = written_nodes(model.graph)
    first: dict[str, Node] = {}
    for node in list(model.graph.nodes):
        if not _is_shared(node) or not written.isdisjoint((node, *node.all_input_nodes)):
            continue
        kept = first.setdefault(repr((node.target, _arguments(model, node))), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            model.graph.erase_node(node)


def _is_shared(node: Node) -> bool:
    """Return whether all nodes equal to a node have the same value."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and source.target is ops.quantize_mx
    if node.target not in _SHARED:
        return False
    quantization = Quantize.of(node) or FakeQuantize.of(node)
    return quantization is None or not (ROUNDINGS[quantization.rounding].random and quantization.seed is None)


def _arguments(model: GraphModule, node: Node) -> list[Any]:
    """Return the arguments of a node; a parameter or buffer by its identity, since a tied weight has two names."""
    call = Quantize.of(node) or FakeQuantize.of(node) or Dequantize.of(node)

    def key(n: Node) -> object:
        return id(attribute_of(model, n)) if n.op == "get_attr" else n.name

    return [key(a) if isinstance(a, Node) else a for a in (node.args if call is None else call.args)]
