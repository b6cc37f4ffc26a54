"""The quantize/dequantize pair of a quantized tensor: insert it, and recognize it and the graphs that hold it."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import (
    Dequantize,
    Quantize,
    args_of,
    is_ours,
    set_value,
    shape_of,
)
from pt2mx.kernels.packing import is_packed
from pt2mx.ops.checks import from_front
from pt2mx.ops.tensor_scale import TensorScale
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: meta key of a `dequantize_mx` node: the spec of its pair
SPEC_KEY = "mx_spec"

#: meta key of a `dequantize_mx` node of an optimized float graph: a weight that is not quantized again
ROUNDED_KEY = "mx_rounded"

#: meta keys of a node's location in the model's source and module tree
PROVENANCE_KEYS = ("stack_trace", "nn_module_stack")

#: meta that marks the nodes of a portable program; it is saved with the program
PORTABLE = {"mx_operators": "written out"}

#: names that torchao gives the observers of a prepared model and their tensors
_OBSERVER = re.compile(r"(.+\.)?activation_post_process_\d+\..+")


def unlike_converted(model: GraphModule, tensors: Iterable[str]) -> str | None:
    """Return what a graph is, with an article, if it is not a converted one; `tensors`: names of its parameters and
    buffers."""
    if is_portable(model):
        return "a portable program, whose operators are written out"
    if holds_observers(tensors):
        return "one with observers, of a prepared model"
    if not any(any(map(is_ours, graph.graph.nodes)) for graph in graph_modules(model)):
        return "one without quantized tensors"
    return None


def is_portable(model: GraphModule) -> bool:
    """Return whether a graph belongs to a program from `make_portable`, also after saving and loading."""
    return any(PORTABLE.items() <= (node.meta.get("custom") or {}).items() for node in model.graph.nodes)


def holds_observers(names: Iterable[str]) -> bool:
    """Return whether the names of parameters and buffers include observers, as in a prepared model or its export."""
    return any(map(_OBSERVER.fullmatch, names))


def insert_quantize_dequantize(
    x: Node,
    spec: MXSpec,
    consumer: Node | None = None,
    tensor_scale: Node | None = None,
    amax: Node | None = None,
) -> Node:
    """Insert `quantize_mx -> getitem x2 -> dequantize_mx` after `x` and return the last node. Users of x still use x.

    `tensor_scale`: a node, for a scale format with one; None computes it (`tensor_scale_mx`) from `amax`, the largest
    magnitude of several tensors, or from x.

    `x` must carry `val` meta of a float tensor. The new nodes get `val` meta, and the source location and module of
    `consumer` (or of x): a pair belongs to the operator whose operand it quantizes.
    """
    graph, value = x.graph, x.meta["val"]
    spec, created = from_front(spec, value), []
    if spec.has_tensor_scale and tensor_scale is None:
        with graph.inserting_after(x if amax is None else max(x, amax)):
            of_tensor = TensorScale(x if amax is None else amax, spec)
            tensor_scale = graph.call_function(ops.tensor_scale_mx, of_tensor.args)
        created.append(tensor_scale)
    with graph.inserting_after(tensor_scale if created else x):
        quantize = graph.call_function(ops.quantize_mx, Quantize(x, spec, tensor_scale=tensor_scale).args)
    with graph.inserting_after(quantize):
        scale = graph.call_function(operator.getitem, (quantize, 0))
    with graph.inserting_after(scale):
        data = graph.call_function(operator.getitem, (quantize, 1))
    created += [quantize, scale, data]
    length = None
    if is_packed(spec.element.bits):  # packed codes may be padded
        length = value.shape[spec.axis]
        if not isinstance(length, int):
            with graph.inserting_after(data):
                length = graph.call_function(torch.ops.aten.sym_size.int, (x, spec.axis))
            created.append(length)
    with graph.inserting_after(created[-1]):
        values = Dequantize(data, scale, spec, value.dtype, length, tensor_scale)
        dequantize = graph.call_function(ops.dequantize_mx, values.args)
    for node in (*created, dequantize):
        node.meta.update({key: n.meta[key] for n in (x, consumer or x) for key in PROVENANCE_KEYS if key in n.meta})
    if tensor_scale is None and all(isinstance(size, int) for size in value.shape) and value.is_contiguous():
        # what the operators would return, in a fifth of the time
        quantized = tuple(value.new_empty(s, dtype=dtype) for s, dtype in _results(value.shape, quantize.args[1:]))
        quantize.meta["val"], dequantize.meta["val"] = quantized, torch.empty_like(value)
        scale.meta["val"], data.meta["val"] = quantized
    else:
        for node in (*created, dequantize):
            set_value(node)
    dequantize.meta[SPEC_KEY] = spec
    return dequantize


@functools.lru_cache(maxsize=1024)
def _results(shape: torch.Size, args: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of the scale and the codes of a tensor of that shape; `args` follow it in the
    operator."""
    return [(one.shape, one.dtype) for one in ops.quantize_mx(torch.empty(shape, device="meta"), *args)]


def insert_amax(tensors: list[Node], before: Node) -> Node:
    """Insert the largest finite magnitude of several tensors, which has no gradient, and return its node, () float32.

    Args:
        tensors: not empty, with `val` meta.
        before: a node after all of them, which the new nodes precede.
    """
    graph, created = before.graph, []

    def insert(operator: OpOverload, *args: Any) -> Node:
        created.append(graph.call_function(operator, args))
        return created[-1]

    with graph.inserting_before(before):
        each = []
        for tensor in tensors:  # linalg_vector_norm would be ten times as slow
            finite = insert(aten.nan_to_num.default, insert(aten.detach.default, tensor), 0.0, 0.0, 0.0)
            amax = insert(aten.amax.default, insert(aten.abs.default, finite))
            each.append(insert(aten.to.dtype, amax, torch.float32))
        insert(aten.amax.default, insert(aten.stack.default, each))
    for node in created:
        node.meta.update({key: before.meta[key] for key in PROVENANCE_KEYS if key in before.meta})
        set_value(node)
    return created[-1]


def quantize_of(dequantize: Node) -> Node | None:
    """Return the `quantize_mx` node of the pair that a `dequantize_mx` node ends. None for another node, for one that
    reads buffers, and if format or blocks of the two differ."""
    pair = Dequantize.of(dequantize)
    if pair is None or not _are_items(pair.codes, pair.scale):
        return None
    quantize, item = args_of(pair.codes)
    call = Quantize.of(quantize) if isinstance(quantize, Node) else None
    rank = 0 if call is None else len(shape_of(call.x) or ())
    if call is None or not rank or (item, pair.scale.args) != (1, (quantize, 0)):
        return None
    same = _of_codes(pair.spec, rank) == _of_codes(call.spec, rank) and pair.tensor_scale == call.tensor_scale
    return quantize if same else None


@functools.lru_cache(maxsize=1024)
def _of_codes(spec: MXSpec, rank: int) -> MXSpec:
    """Return what codes tell of a spec, which is all but modes, with the axis counted from the front."""
    return spec.replace(axis=spec.axis % rank, scale_mode=None, rounding="even")


def _are_items(*nodes: Node) -> bool:
    return all(node.target is operator.getitem for node in nodes)


def spec_of_dequantize(dequantize: Node) -> MXSpec:
    """Return the spec of a pair. For a folded weight in a re-exported graph, scale mode and rounding are unknown: only
    the codes reflect them."""
    if SPEC_KEY in dequantize.meta:
        return dequantize.meta[SPEC_KEY]
    if (quantize := quantize_of(dequantize)) is not None:
        return Quantize.expect(quantize).spec
    return Dequantize.expect(dequantize).spec
