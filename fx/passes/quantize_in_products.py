"""Products on the CPU that quantize their result before they store it, with the activation between: fewer bytes go
through memory, and no kernel of its own reads them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.activations import call_before
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import LinearMX, RotatedFakeQuantize, dtype_of, named_args, shape_of, value_of
from pt2mx.kernels.constants import supports_epilogue
from pt2mx.kernels.cpu.linear import FEW_ROWS, has_units
from pt2mx.ops.quantized_activations import activation_fake_quantize_mx
from pt2mx.ops.quantized_linear import linear_fake_quantize_mx
from pt2mx.spec import MXSpec


@graph_pass(LinearMX, (activation_fake_quantize_mx, RotatedFakeQuantize))
def quantize_in_products(model: GraphModule) -> None:
    """Replace `activation_fake_quantize_mx`, or `rotated_fake_quantize_mx` without a rotation, of a `linear_mx` that
    nothing else reads by `linear_fake_quantize_mx`, where this machine's units multiply many rows of bfloat16 values
    with the weight and its kernel quantizes like this: in blocks of 32 values, to even. The values stay the same to the
    bit."""
    for quantized in list(model.graph.nodes):
        found = quantization_of(quantized)
        if found is None:
            continue
        product, activation, *modes = found
        call = LinearMX.of(product)
        if call is None or set(product.users) != {quantized} or not _fits(product, call):
            continue
        element, block_size, scale_mode, rounding, _ = modes
        spec = MXSpec(element, block_size, -1, scale_mode, rounding)
        if not supports_epilogue(spec, (shape_of(product) or (None,))[-1], dtype_of(product)):
            continue
        weight = call.x, call.codes, call.scale, call.bias, call.element, call.block_size
        fused = call_before(product, linear_fake_quantize_mx, *weight, dtype_of(product), activation, *modes)
        fused.meta.update({key: value for key, value in quantized.meta.items() if key != "val"})
        quantized.replace_all_uses_with(fused)
        for node in (quantized, product):
            model.graph.erase_node(node)


def quantization_of(node: Node) -> tuple[Any, ...] | None:
    """The product that is quantized, the activation before, and the modes; None of another node."""
    if node.target is activation_fake_quantize_mx:
        return tuple(named_args(node).values())
    rotated = RotatedFakeQuantize.of(node)
    return (rotated.x, "none", *rotated.args[2:]) if rotated is not None and rotated.size == 1 else None


def _fits(product: Node, call: LinearMX) -> bool:
    value, k = value_of(product), (shape_of(call.x) or (None,))[-1]
    if value is None or value.device.type != "cpu" or call.rotation or dtype_of(call.x) != torch.bfloat16:
        return False
    rows = value.shape[:-1]
    known = [size for size in rows if isinstance(size, int)]
    if len(known) == len(rows) and math.prod(known) <= FEW_ROWS:
        return False
    return isinstance(k, int) and has_units(MXSpec(call.element, call.block_size), k)
