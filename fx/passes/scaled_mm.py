"""Multiply quantized activations and packed weights on the MX tensor cores of NVIDIA Blackwell GPUs.

Untested on hardware: see `pt2mx.kernels.gpu.scaled_mm`.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    Dequantize,
    FakeQuantize,
    LinearMX,
    Quantize,
    insert_before,
    insert_call,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.qdq import quantize_of
from pt2mx.fx.graph.tensors import erase_unused, replace_node
from pt2mx.fx.passes.fold_weights import fold_constant
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.scaled_mm import FORMS
from pt2mx.kernels.select import supports
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.scaled_mm import ScaledMM, swizzle_scale


@graph_pass(LinearMX, (FakeQuantize, Dequantize))
def use_scaled_mm(model: GraphModule) -> None:
    """Multiply the codes on MX tensor cores: `linear_mx(fake_quantize_mx(x), weight)` becomes
    `scaled_mm_mx(*quantize_mx(x), weight)`. x may also come from a quantize/dequantize pair.

    The tensor cores must support the elements of both (`FORMS` of `pt2mx.kernels.scaled_mm`), with blocks of 32 along
    K. K must be a multiple of 32 and N a multiple of 16. The scales of x are swizzled at each call, the weight's scales
    once, now. Tensor cores decide the order and precision of sums.

    Args:
        model: a lowered model whose weights are not in the MMA layout. `lower_to_inductor(..., scaled_mm=True)` runs
            this pass.
    """
    written = written_nodes(model.graph)
    codes: dict[Node, tuple[Node, Node]] = {}
    scales: dict[object, Node] = {}
    for node, call in LinearMX.calls_in(model.graph):
        quantization = _quantization(call.x)
        if quantization is None or not _runs_on_mx_cores(node, quantization, call):
            continue
        if not written.isdisjoint((call.codes, call.scale)):
            continue
        if call.x not in codes:
            codes[call.x] = _codes(call.x)
        source = call.scale.target if call.scale.op == "get_attr" else call.scale  # a tied weight has several nodes
        if source not in scales:
            scales[source] = insert_before(node, swizzle_scale, call.scale)
        of_codes: ScaledMM[Node] = ScaledMM(
            x=codes[call.x][0],
            x_scale=codes[call.x][1],
            weight=call.codes,
            weight_scale=scales[source],
            bias=call.bias,
            x_element=quantization.spec.element.name,
            weight_element=call.spec.element.name,
            target_dtype=value_of(node).dtype,
        )
        matmul = insert_call(node, of_codes)
        replace_node(node, matmul)
    constants = constant_nodes(model.graph)
    for name, swizzled in scales.items():
        if isinstance(name, str) and swizzled in constants:
            fold_constant(model, swizzled, f"{name}_swizzled")
            erase_unused(swizzled)


def _runs_on_mx_cores(node: Node, quantization: Quantize | FakeQuantize, call: LinearMX) -> bool:
    """Return whether the GPU has MX tensor cores that support the elements, dtypes and sizes of a matmul."""
    value, form = value_of(node), FORMS.get((quantization.spec.element.name, call.spec.element.name))
    if value is None or form is None or value.dtype not in form.results or sizes_in_blocks(quantization, call) is None:
        return False
    return supports("multiply MX on tensor cores", value, form)


def sizes_in_blocks(quantization: Quantize | FakeQuantize, call: LinearMX) -> tuple[int, int] | None:
    """Return the K and N of a matmul whose quantized x and weight both have plain scales of 32 values along K, in sizes
    that tensor cores take; None for another one."""
    x, weight = shape_of(call.x), shape_of(call.codes)
    if x is None or weight is None or call.rotation or quantization.spec.axis not in (-1, len(x) - 1):
        return None
    if not all(spec.has_plain_scale and spec.block_size == BLOCK for spec in (quantization.spec, call.spec)):
        return None
    if ROUNDINGS[quantization.spec.rounding].random:
        return None  # stochastic rounding must not draw twice, for other users and here
    k, n = x[-1], weight[0]
    if not isinstance(k, int) or k % BLOCK or not isinstance(n, int) or n % 16:
        return None
    return k, n


def _quantization(x: Node) -> Quantize | FakeQuantize | None:
    """Return the quantization that computes a node's values; None if they are not quantized."""
    quantize = quantize_of(x)
    return FakeQuantize.of(x) if quantize is None else Quantize.expect(quantize)


def _codes(x: Node) -> tuple[Node, Node]:
    """Return codes and swizzled scales of a quantized node, computed at its position."""
    if (pair := Dequantize.of(x)) is not None:
        codes, scale = pair.codes, pair.scale
    else:
        call = FakeQuantize.expect(x)
        quantize = insert_call(x, Quantize(call.x, call.spec))
        scale, codes = (insert_before(x, operator.getitem, quantize, i) for i in range(2))
    return codes, insert_before(x, swizzle_scale, scale)
