"""Multiply quantized activations and weights on FP8 tensor cores (`pt2mx.kernels.fp8_rowwise`)."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    FakeQuantize,
    LinearMX,
    insert_before,
    insert_call,
    name_of,
    read_instead,
    register_buffer,
    shape_of,
    tensor_of,
    value_of,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.fuse_activation_quantize import activation_before, norm_before
from pt2mx.fx.passes.scaled_mm import sizes_in_blocks
from pt2mx.kernels.fp8_rowwise import ROOMS, of_packed
from pt2mx.kernels.select import supports
from pt2mx.ops.fp8_rowwise import LayerNormFP8Rows, MmFP8Rows, QuantizeFP8Rows

#: fewest rows of x, and fewest values of a weight, for which FP8 is faster than bfloat16. Time relative to bfloat16 on
#: an H200: 0.82 for 2048 x 1024 x 1024, 1.3 for 2048 x 1536 x 384
_LEAST_ROWS, _LEAST_WEIGHT = 256, 1 << 20


@graph_pass(LinearMX, FakeQuantize)
def use_fp8_rowwise(model: GraphModule) -> None:
    """Compute a bfloat16 `linear_mx(fake_quantize_mx(x), weight)` as a matmul of FP8 rows.

    Both elements must leave room for their scales in E4M3, and the GPU must have FP8 tensor cores. The kernel that
    converts x to rows also computes the activation or the layer norm before it.

    The weight becomes 8-bit codes, `<weight>_data_fp8`, with one scale per row. The pass skips small matmuls, and
    weights with a row whose scales differ too much.
    """
    constants, weights = constant_nodes(model.graph), dict[tuple[object, ...], tuple[str, str] | None]()
    written = written_nodes(model.graph)
    rows: dict[Node, list[Node]] = {}
    for node, call in LinearMX.calls_in(model.graph):
        quantization = FakeQuantize.of(call.x)
        if quantization is None or not _is_faster_in_fp8(node, call, quantization):
            continue
        if any(n.op != "get_attr" or n not in constants for n in (call.codes, call.scale)):
            continue
        key = call.codes.target, call.scale.target, call.spec.element
        if key not in weights:
            weights[key] = _register_rows(model, call)
        if (names := weights[key]) is None:
            continue
        if call.x not in rows:
            rows[call.x] = _rows_of(call.x, quantization, written)
        with model.graph.inserting_before(node):
            weight, scale = (read_instead(model, *read) for read in zip(names, (call.codes, call.scale), strict=True))
            data, of_x, unfit = rows[call.x]
            of_rows: MmFP8Rows[Node] = MmFP8Rows(data, of_x, unfit, weight, scale, call.bias)
            matmul = model.graph.call_function(of_rows.overload, of_rows.args)
        if node in written:
            written.add(matmul)
        replace_node(node, matmul)


def _is_faster_in_fp8(node: Node, call: LinearMX, quantization: FakeQuantize) -> bool:
    """Return whether the GPU has FP8 tensor cores that support a matmul, and they are faster."""
    value, x, sizes = value_of(node), shape_of(call.x), sizes_in_blocks(quantization, call)
    if value is None or x is None or sizes is None or value.dtype != torch.bfloat16 or call.target_dtype is not None:
        return False
    if not {quantization.spec.element.name, call.spec.element.name} <= ROOMS.keys():
        return False
    rows = x[:-1]
    known = all(isinstance(r, int) for r in rows)
    if math.prod(sizes) < _LEAST_WEIGHT or (known and math.prod(r for r in rows if isinstance(r, int)) < _LEAST_ROWS):
        return False
    return supports("multiply FP8 rows", value)


def _register_rows(model: GraphModule, call: LinearMX) -> tuple[str, str] | None:
    """Register buffers of a weight's FP8 rows and return their names; None if a row does not fit."""
    (k,) = (shape_of(call.x) or (0,))[-1:]
    codes, scale = of_packed(tensor_of(model, call.codes), tensor_of(model, call.scale), call.spec.element, int(k))
    if bool((scale < 0).any()):
        return None
    return (
        register_buffer(model, f"{name_of(call.codes)}_fp8", codes),
        register_buffer(model, f"{name_of(call.scale)}_fp8", scale),
    )


def _rows_of(x: Node, quantization: FakeQuantize, written: set[Node]) -> list[Node]:
    """Insert the conversion of a `fake_quantize_mx`'s input to FP8 rows, and return codes, scale and rest.

    A node in memory that the graph writes (`written`) is read only where the graph read it: elsewhere it may hold other
    values.
    """
    norm = norm_before(quantization.x, written)
    if norm is not None:
        call = insert_call(norm.node, LayerNormFP8Rows(*norm[1:], quantization.spec))
        normed, *rows = (insert_before(norm.node, operator.getitem, call, i) for i in range(4))
        replace_node(norm.node, normed)
        return rows
    activation, source = activation_before(quantization.x, written)
    call = insert_call(x, QuantizeFP8Rows(source, quantization.spec, activation))
    return [insert_before(x, operator.getitem, call, i) for i in range(3)]
