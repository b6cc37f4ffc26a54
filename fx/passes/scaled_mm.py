"""Products of quantized activations and packed weights on the MX tensor cores of NVIDIA Blackwell GPUs.

Untested on hardware: see `pt2mx.ops.scaled_mm`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import Dequantize, FakeQuantize, LinearMX, Quantize, dtype_of, set_value, shape_of, value_of
from pt2mx.fx.graph.qdq import quantize_of
from pt2mx.fx.graph.tensors import erase_unread
from pt2mx.fx.passes.fold_weights import fold_constant
from pt2mx.modes import ROUNDINGS
from pt2mx.ops import linear
from pt2mx.ops.scaled_mm import BLOCK, FORMS, Form, scaled_mm_mx, swizzle_scale


@GraphPass
def use_scaled_mm(model: GraphModule, force: bool = False) -> None:
    """Let tensor cores multiply the codes: `linear_mx(fake_quantize_mx(x), weight)` becomes
    `scaled_mm_mx(*quantize_mx(x), weight)`, and so does one whose x is a pair of quantization and dequantization.

    It is done where both have an element that tensor cores take (`pt2mx.ops.scaled_mm.FORMS`) in blocks of 32 along K,
    a multiple of 32, N is a multiple of 16, and the GPU has such cores. The scales of x are put in their order at each
    call, those of the weight now. The sums are those of the tensor cores.

    Args:
        model: a lowered one, before its weights become fragments: `lower_to_inductor(..., scaled_mm=True)` does it all.
        force: on every device, where the product is emulated. For tests.
    """
    written, codes, scales = written_nodes(model.graph), {}, {}
    for node in model.graph.find_nodes(op="call_function", target=linear.linear_mx):
        x, data, scale, bias, element, block_size = LinearMX.of(node)
        form = _form(x, element, block_size)
        if form is None or not _fits(node, form, force) or not written.isdisjoint((data, scale)):
            continue
        if x not in codes:
            codes[x] = _codes(x)
        held = scale.target if scale.op == "get_attr" else scale  # a tied weight has several nodes
        if held not in scales:
            scales[held] = _insert_before(node, swizzle_scale, scale)
        args = (*codes[x], data, scales[held], bias, _quantization(x).element, element, dtype_of(node))
        product = _insert_before(node, scaled_mm_mx, *args)
        product.meta.update(node.meta)
        node.replace_all_uses_with(product)
        erase_unread(node)
    constants = constant_nodes(model.graph)
    for held, swizzled in scales.items():
        if isinstance(held, str) and swizzled in constants:
            fold_constant(model, swizzled, f"{held}_swizzled")
            erase_unread(swizzled)


def _fits(node: Node, form: Form, force: bool) -> bool:
    """Whether tensor cores take dtypes and sizes of a product, and are there."""
    value, (rows, _) = value_of(node), shape_of(node.args[1])
    values = shape_of(node.args[0])[-1]
    if value.dtype not in form.results or not isinstance(values, int) or values % BLOCK or rows % 16:
        return False
    return force or (value.device.type == "cuda" and torch.cuda.get_device_capability(value.device)[0] in form.majors)


def _form(x: Node, element: str, block_size: int) -> Form | None:
    """How tensor cores multiply what a node quantizes by a weight of that element; None where they do not."""
    of = _quantization(x) if value_of(x) is not None else None
    if of is None or not block_size == of.block_size == BLOCK or ROUNDINGS[of.rounding].random:
        return None  # a stochastic rounding that others read too must not draw twice
    return FORMS.get((of.element, element)) if of.axis in (-1, value_of(x).dim() - 1) else None


def _quantization(x: Node) -> Quantize | FakeQuantize | None:
    """How a node is quantized; None where it is not."""
    if x.target is ops.fake_quantize_mx:
        return FakeQuantize.of(x)
    quantize = quantize_of(x)
    return None if quantize is None else Quantize.of(quantize)


def _codes(x: Node) -> tuple[Node, Node]:
    """Codes and swizzled scales of what a node quantizes, computed where it is."""
    if x.target is ops.dequantize_mx:
        data, scale, *_ = Dequantize.of(x)
    else:
        quantize = _insert_before(x, ops.quantize_mx, *FakeQuantize.of(x)[:7])
        scale, data = (_insert_before(x, operator.getitem, quantize, i) for i in range(2))
    return data, _insert_before(x, swizzle_scale, scale)


def _insert_before(place: Node, target: Callable, *args: object) -> Node:
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args)
    set_value(node)
    return node
