"""Convolutions of quantized activations as products, on units for bfloat16.

The patches of x under the kernel are gathered as rows, their channels last, and multiplied with the weight, whose
blocks along its input channels are blocks of a row then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.attributes import name_of, register_buffer, tensor_of
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import Dequantize, FakeQuantize, named_args, set_value, shape_of, value_of
from pt2mx.fx.graph.tensors import erase_unread
from pt2mx.fx.graph.views import settle_order, takes_any_order
from pt2mx.fx.passes.bfloat16_products import is_quantized, quantization_to_bfloat16
from pt2mx.kernels.cpu.linear import multiplies_bfloats
from pt2mx.ops.linear import linear_mx
from pt2mx.ops.rotated_quantization import rotated_fake_quantize_mx
from pt2mx.spec import MXSpec

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """A convolution in two dimensions of x: (B, C, H, W) by `codes` and `scale` of a weight (N, C, *kernel); `spec` is
    that of the weight as rows, `padding` and `stride` are of height and width."""

    x: FakeQuantize
    codes: Node
    scale: Node
    bias: Node | None
    spec: MXSpec
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


@GraphPass
def use_products_for_convolutions(model: GraphModule) -> None:
    """Replace `conv2d` in float32 by `linear_mx` of patches in bfloat16, where x is quantized along its channels, the
    weight is held packed along them, both of these are whole blocks of 32, and this machine has units for bfloat16.

    The codes become buffers `<weight>_data_rows` and `<weight>_scale_rows`. Grouped and dilated convolutions stay. The
    values of x and of the weight stay what they are; sums are in float32 in another order. Results lie in memory with
    their channels last, and what is computed from them may.
    """
    constants, products = constant_nodes(model.graph), {}
    for node in model.graph.find_nodes(op="call_function", target=aten.conv2d.default):
        convolution = _convolution(node)
        if convolution is None or not constants.issuperset((convolution.codes, convolution.scale)):
            continue
        if any(n.op != "get_attr" for n in (convolution.codes, convolution.scale)) or not takes_any_order(node):
            continue
        product = _product(model, node, convolution)
        product.meta.update({key: value for key, value in node.meta.items() if key != "val"})
        node.replace_all_uses_with(product)
        erase_unread(node)
        products[product] = node.meta["val"]
    settle_order(model.graph, products)


def _convolution(node: Node) -> Convolution | None:
    """The convolution that a node computes, if units for bfloat16 do it as a product."""
    given, value = named_args(node), value_of(node)
    x, weight = FakeQuantize.of(given["input"]), Dequantize.of(given["weight"])
    if x is None or weight is None or value is None or value.dtype != torch.float32 or value.device.type != "cpu":
        return None
    shape, sizes = shape_of(given["input"]) or (), shape_of(given["weight"]) or ()
    if len(shape) != 4 or given["groups"] != 1 or {*given["dilation"]} != {1} or not _is_dense(value):
        return None
    if x.axis % 4 != 1 or weight.axis % 4 != 1 or not is_quantized(given["input"]):
        return None
    if quantization_to_bfloat16(replace(x, axis=-1), 4) is None:
        return None
    _, channels, high, wide = (int(n) for n in sizes)  # of a buffer
    spec = MXSpec(weight.element, min(weight.block_size, channels))
    if channels % spec.block_size or not multiplies_bfloats(spec, channels * high * wide):
        return None
    stride, padding = (tuple(n) * (2 // len(n)) for n in (given["stride"], given["padding"]))
    return Convolution(x, weight.codes, weight.scale, given["bias"], spec, (high, wide), stride, padding)


def _is_dense(value: Tensor) -> bool:
    return value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last)


def _product(model: GraphModule, node: Node, convolution: Convolution) -> Node:
    """Insert what computes a convolution; gives its result."""
    with model.graph.inserting_before(node):
        call = _caller(model.graph)
        last = call(aten.permute.default, convolution.x.x, (0, 2, 3, 1))  # (B, H, W, C)
        of = replace(convolution.x, x=last, axis=-1)
        values = call(rotated_fake_quantize_mx, *(quantization_to_bfloat16(of, 4) or ()))
        rows = [_rows(model, n) for n in (convolution.codes, convolution.scale)]
        spec, bias = convolution.spec, convolution.bias
        patches = _patches(call, values, convolution)
        result = call(
            linear_mx, patches, *rows, bias, spec.element.name, spec.block_size, 0, torch.float32
        )  # (B, H', W', N)
        return call(aten.permute.default, result, (0, 3, 1, 2))


def _patches(call: Callable[..., Node], x: Node, convolution: Convolution) -> Node:
    """(B, H, W, C) -> (B, H', W', values under the kernel)."""
    (high, wide), (down, right) = convolution.padding, convolution.stride
    if high or wide:
        x = call(aten.constant_pad_nd.default, x, (0, 0, wide, wide, high, high))
    if convolution.kernel == (1, 1):
        if (down, right) == (1, 1):
            return x
        x = call(aten.slice.Tensor, x, 1, None, None, down)
        return call(aten.slice.Tensor, x, 2, None, None, right)
    x = call(aten.unfold.default, x, 1, convolution.kernel[0], down)
    x = call(aten.unfold.default, x, 2, convolution.kernel[1], right)  # (B, H', W', C, *kernel)
    x = call(aten.permute.default, x, (0, 1, 2, 4, 5, 3))
    return call(aten.flatten.using_ints, x, 3)


def _rows(model: GraphModule, node: Node) -> Node:
    """A buffer of codes or scales (N, C, *kernel) as rows (N, kernel and C), placed before `node`'s readers."""
    value = tensor_of(model, node).permute(0, 2, 3, 1).flatten(1).contiguous()
    name = f"{name_of(node)}_rows"
    buffer = model.graph.get_attr(register_buffer(model, name, value))
    buffer.meta.update(node.meta)
    if "val" in node.meta:
        buffer.meta["val"] = node.meta["val"].new_empty(value.shape)
    return buffer


def _caller(graph: Graph) -> Callable[..., Node]:
    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        set_value(node)
        return node

    return call
