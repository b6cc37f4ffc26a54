"""Compute convolutions of quantized activations as matmuls with packed weights, by matrix instructions for bfloat16 or
8-bit codes.

Channels are last in memory, so that each block of channels belongs to one pixel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.aliasing import Writes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.memory_order import accepts_any_order, settle_order
from pt2mx.fx.graph.node import (
    Conv2dMX,
    Dequantize,
    FakeQuantize,
    RotatedFakeQuantize,
    inherit_location,
    name_of,
    named_args,
    operator_of,
    read_instead,
    register_buffer,
    set_value,
    shape_of,
    tensor_of,
    value_of,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.bf16_matmul import is_quantized, quantization_to_bfloat16
from pt2mx.kernels.select import supports
from pt2mx.spec import MXSpec

aten = torch.ops.aten

#: operator -> number of spatial dimensions
_DIMENSIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2}
_GROUP = 32  # channels that are multiplied together


@dataclass(frozen=True)
class Convolution:
    """A convolution of images by a packed weight.

    Args:
        dimensions: the number of spatial dimensions.
        x: the node that quantizes the images.
        quantization: the call that quantizes the images with channels last; None if the values of x are cast instead.
        codes, scale: of the weight (N, C, *kernel).
        spec: of the weight with channels last.
        conv_args: stride, padding and dilation, each of height and width.
    """

    dimensions: int
    x: Node
    quantization: RotatedFakeQuantize | None
    codes: Node
    scale: Node
    bias: Node | None
    spec: MXSpec
    conv_args: tuple[tuple[int, int], ...]


@graph_pass(tuple(_DIMENSIONS), FakeQuantize, Dequantize)
def use_matmuls_for_convolutions(model: GraphModule) -> None:
    """Replace `conv1d` and `conv2d` by `conv2d_mx`, which takes x in bfloat16.

    x must be quantized along its channels, the weight packed along them in blocks of 32 or more, and the machine must
    have matrix instructions for both.

    The codes become buffers `<weight>_data_rows` and `<weight>_scale_rows`, with their channels last. The pass skips
    convolutions with groups, and those whose channels would fill less than three quarters of groups of 32. In float32
    models it also replaces convolutions of up to 23 channels, such as an image's, with a large kernel without dilation
    along a row: the kernel multiplies a row of pixels as one. The values of x and of the weight do not change; sums are
    in float32, in another order. Results have their channels last in memory, and tensors computed from them may inherit
    that.
    """
    constants, matmuls, writes = constant_nodes(model.graph), {}, Writes(model.graph)
    quantized: dict[Node, Node] = {}  # node -> its values with channels last, shared by all convolutions of the node
    buffers: dict[tuple[str, int], str] = {}  # codes or scales of a weight -> the buffer with channels last
    for node in [n for n in model.graph.nodes if n.target in _DIMENSIONS]:
        convolution = _convolution(node)
        if convolution is None:
            continue
        if any(n.op != "get_attr" or n not in constants for n in (convolution.codes, convolution.scale)):
            continue
        if not accepts_any_order(node, writes):
            continue
        if convolution.x not in quantized:
            quantized[convolution.x] = _channels_last(model, convolution)
        matmul = _matmul(model, node, convolution, quantized[convolution.x], buffers)
        replace_node(node, matmul, "val")
        matmuls[matmul] = node.meta["val"]
    settle_order(model.graph, matmuls)


def _convolution(node: Node) -> Convolution | None:
    """Return the convolution that a node computes if matrix instructions can compute it; otherwise None."""
    args, value, dimensions = named_args(node), value_of(node), _DIMENSIONS[operator_of(node)]
    x, weight = FakeQuantize.of(args["input"]), Dequantize.of(args["weight"])
    if x is None or weight is None or value is None:
        return None
    if not (x.spec.has_plain_scale and weight.spec.has_plain_scale):
        return None
    if value.dtype not in (torch.float32, torch.bfloat16) or args["groups"] != 1 or not _is_dense(value):
        return None
    rank, (_, channels, *kernel) = dimensions + 2, shape_of(args["weight"]) or ()
    if len(shape_of(args["input"]) or ()) != rank or x.spec.axis % rank != 1 or weight.spec.axis % rank != 1:
        return None
    quantization, spec = quantization_to_bfloat16(x.replace(spec=x.spec.replace(axis=-1)), rank), weight.spec
    if quantization is None or not is_quantized(args["input"]) or not isinstance(channels, int):
        return None
    is_narrow = 4 * channels < 3 * (channels + -channels % _GROUP)
    if is_narrow and (value.dtype != torch.float32 or args["dilation"][-1] != 1):
        return None
    if not supports("convolve packed weights", value, x.spec, spec, channels, kernel, is_narrow):
        return None
    if is_narrow:
        quantization = None  # a kernel of its own is slower for rows of few values
    no_height = ((1,), (0,), (1,))  # stride, padding and dilation of the height that conv1d lacks
    conv_args = zip(no_height, (args[name] for name in ("stride", "padding", "dilation")), strict=True)
    pairs = tuple(
        (*height, *sizes) if dimensions == 1 else tuple(sizes) * (2 // len(sizes)) for height, sizes in conv_args
    )
    return Convolution(dimensions, args["input"], quantization, weight.codes, weight.scale, args["bias"], spec, pairs)


def _is_dense(value: Tensor) -> bool:
    return value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))


def _channels_last(model: GraphModule, convolution: Convolution) -> Node:
    """Insert the quantization of x with channels last, at x's own quantization: (B, H, W, C) bfloat16."""
    quantization = convolution.quantization
    with model.graph.inserting_before(convolution.x.next if quantization is None else convolution.x):
        call = _caller(model.graph, convolution.x)
        x = convolution.x if quantization is None else quantization.x
        last = call(aten.permute.default, x, (0, 2, 3, 1) if convolution.dimensions == 2 else (0, 2, 1))
        if convolution.dimensions == 1:
            last = call(aten.unsqueeze.default, last, 1)
        if quantization is None:
            return call(aten.to.dtype, last, torch.bfloat16)
        return call(quantization.overload, *quantization.replace(x=last).args)


def _matmul(
    model: GraphModule, node: Node, convolution: Convolution, values: Node, buffers: dict[tuple[str, int], str]
) -> Node:
    """Insert the calls that compute a convolution, and return the node of the result."""
    with model.graph.inserting_before(node):
        call = _caller(model.graph, node)
        codes, scale = (
            _rows(model, n, convolution.dimensions, buffers) for n in (convolution.codes, convolution.scale)
        )
        stride, padding, dilation = convolution.conv_args
        packed = Conv2dMX(
            x=values,
            codes=codes,
            scale=scale,
            bias=convolution.bias,
            spec=convolution.spec,
            stride=stride,
            padding=padding,
            dilation=dilation,
            target_dtype=node.meta["val"].dtype,
        )
        result = call(packed.overload, *packed.args)  # (B, H', W', N)
        if convolution.dimensions == 2:
            return call(aten.permute.default, result, (0, 3, 1, 2))
        return call(aten.permute.default, call(aten.squeeze.dim, result, 1), (0, 2, 1))


def _rows(model: GraphModule, node: Node, dimensions: int, buffers: dict[tuple[str, int], str]) -> Node:
    """Insert a read of codes or scales (N, C, *kernel) as (N, height, width, C), from a buffer that all users share."""
    value = tensor_of(model, node)
    value = (value if dimensions == 2 else value.unsqueeze(2)).permute(0, 2, 3, 1)
    key = name_of(node), dimensions
    if key not in buffers:
        buffers[key] = register_buffer(model, f"{name_of(node)}_rows", value.contiguous())
    return read_instead(model, buffers[key], node)


def _caller(graph: Graph, place: Node) -> Callable[..., Node]:
    """Return a function that inserts calls, with the location of a node."""

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        inherit_location(node, place)
        set_value(node)
        return node

    return call
