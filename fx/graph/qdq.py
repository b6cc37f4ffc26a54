"""The quantize/dequantize pair of a quantized tensor in a converted graph: insert it, and recognize it."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pt2mx import ops
from pt2mx.fx.graph.node import (
    Dequantize,
    Quantize,
    args_of,
    set_value,
    shape_of,
)
from pt2mx.kernels.packing import is_packed
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: meta key of a `dequantize_mx` node: the spec of its pair
SPEC_KEY = "mx_spec"

#: meta key of a `dequantize_mx` node of an optimized float graph: a weight that is not quantized again
ROUNDED_KEY = "mx_rounded"

#: meta keys of a node's location in the model's source and module tree
PROVENANCE_KEYS = ("stack_trace", "nn_module_stack")


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
    axis = spec.axis % value.dim()
    spec_args, created = spec.replace(axis=axis).quantize_args(), []
    if spec.scale_format.tensor and tensor_scale is None:
        with graph.inserting_after(x if amax is None else max(x, amax)):
            args = (x if amax is None else amax, spec.element.name, spec.scale_mode, spec.scale_format.name)
            tensor_scale = graph.call_function(ops.tensor_scale_mx, args)
        created.append(tensor_scale)
    scales = *spec.scale_args(), tensor_scale
    with graph.inserting_after(tensor_scale if created else x):
        quantize = graph.call_function(ops.quantize_mx, Quantize(x, *spec_args).with_scales(*scales).args)
    with graph.inserting_after(quantize):
        scale = graph.call_function(operator.getitem, (quantize, 0))
    with graph.inserting_after(scale):
        data = graph.call_function(operator.getitem, (quantize, 1))
    created += [quantize, scale, data]
    length = None
    if is_packed(spec.element.bits):  # packed codes may be padded
        length = value.shape[axis]
        if not isinstance(length, int):
            with graph.inserting_after(data):
                length = graph.call_function(torch.ops.aten.sym_size.int, (x, axis))
            created.append(length)
    with graph.inserting_after(created[-1]):
        blocks = spec.element.name, spec.block_size, value.dtype, axis, length
        dequantize = graph.call_function(ops.dequantize_mx, Dequantize(data, scale, *blocks).with_scales(*scales).args)
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
    dequantize.meta[SPEC_KEY] = spec.replace(axis=axis)
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
    same = (pair.element, pair.block_size, pair.axis % rank) == (call.element, call.block_size, call.axis % rank)
    return quantize if same and pair.scales == call.scales else None


def _are_items(*nodes: Node) -> bool:
    return all(node.target is operator.getitem for node in nodes)


def spec_of_dequantize(dequantize: Node) -> MXSpec:
    """Return the spec of a pair. For a folded weight in a re-exported graph, scale mode and rounding are unknown: only
    the codes reflect them."""
    if SPEC_KEY in dequantize.meta:
        return dequantize.meta[SPEC_KEY]
    if (quantize := quantize_of(dequantize)) is not None:
        return Quantize.expect(quantize).spec
    to = Dequantize.expect(dequantize)
    return MXSpec(
        to.element, to.block_size, to.axis, scale_format=to.scale_format or "e8m0", block_rows=to.block_rows or 1
    )
