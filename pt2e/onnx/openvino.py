"""The target "openvino": standard operators alone, for OpenVINO's CPU plugin.

OpenVINO reads no ONNX functions, so they are inlined. FP4, FP8 and INT8 weights in whole blocks are constants of ONNX's
own types, shaped into blocks: Cast(codes) * Cast(scales), then Reshape. OpenVINO's plugins look for this graph before a
matmul. On the CPU, FP4 and INT8 weights of it stay packed in memory, and the plugin decodes FP8 weights once, when it
compiles the model. onnxruntime computes it once, too, when a session starts, for FP8 and INT8: it has no Cast from FP4.
Functions compute other weights, rows of embeddings, and activations.

OpenVINO reads subnormal constants as zero. A scale must not be zero, because values are divided by it: the smallest
scale becomes 2**-126.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.files import fresh_name, raise_opset, remove_unused, replace_nodes, used_names
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.function_bodies import add_bodies
from pt2mx.pt2e.onnx.native import NATIVE_OPSET, NativeConstants, is_native
from pt2mx.pt2e.onnx.nodes import DOMAIN, DequantizeMX, graphs_in
from pt2mx.pt2e.onnx.standard import times_tensor_scale

inliner = import_extra("onnx.inliner", "onnx")

_SMALLEST = np.finfo(np.float32).smallest_normal


def to_openvino(model: Any) -> Any:
    """Return a model with the values of the nodes of the domain `pt2mx`, in standard operators.

    A model of a lower opset is converted to 24.
    """
    model = raise_opset(model, NATIVE_OPSET)
    used = used_names(model.graph)
    for graph in graphs_in(model.graph):
        _multiply_weights(graph, used)
    model = add_bodies(model)
    for function in model.functions:
        if function.domain == DOMAIN:
            _round_products(function)
    model = inliner.inline_local_functions(model)
    for graph in graphs_in(model.graph):
        _raise_subnormals(graph)
    return model


def _multiply_weights(graph: Any, used: set[str]) -> None:
    """Replace dequantized constants in whole blocks by products of native codes and scales."""
    constants = NativeConstants(graph, used, in_blocks=True)
    nodes: list[Any] = []
    for node in graph.node:
        attributes = DequantizeMX.of(node)
        if attributes is None or not _in_whole_blocks(attributes) or not constants.packed.keys() >= {*node.input}:
            nodes.append(node)
            continue
        codes, scale, tensor_scale = (*node.input, "")[:3]
        shape = [*constants.packed[codes].dims]
        shape[attributes.spec.axis] = attributes.length
        scale = constants.scales(scale, attributes, tensor_scale)
        if tensor_scale:
            scale = times_tensor_scale(node, scale, tensor_scale, attributes, used, nodes)
        nodes += _product(node, attributes, constants.codes(codes, attributes), scale, constants.shape(shape), used)
    replace_nodes(graph, nodes)
    remove_unused(graph)


def _in_whole_blocks(attributes: DequantizeMX) -> bool:
    return is_native(attributes) and attributes.length > 0 and attributes.length % attributes.spec.block_size == 0


def _product(node: Any, attributes: DequantizeMX, codes: str, scale: str, shape: str, used: set[str]) -> list[Any]:
    """Return the nodes that replace a `DequantizeMX` of codes and scales in blocks; `shape` is the shape of Y."""
    (y,), float32 = node.output, onnx.TensorProto.FLOAT
    floats, factors, values, joined = (
        fresh_name(f"{y}_{part}", used) for part in ("codes", "scale", "blocks", "values")
    )
    last = y if attributes.dtype == float32 else joined
    steps: list[tuple[str, list[str], str, dict[str, int]]] = [
        ("Cast", [codes], floats, {"to": float32}),
        ("Cast", [scale], factors, {"to": float32}),
        ("Mul", [floats, factors], values, {}),
        ("Reshape", [values, shape], last, {}),
    ]
    if last != y:
        steps.append(("Cast", [last], y, {"to": attributes.dtype}))
    return [
        onnx.helper.make_node(op_type, inputs, [output], f"{output}_{op_type}", **step)
        for op_type, inputs, output, step in steps
    ]


def _round_products(function: Any) -> None:
    """Take the absolute value of each product that a function subtracts, which is not negative.

    For static shapes OpenVINO computes a product and a difference in one instruction, which rounds once. `ulp_of` needs
    the product rounded.
    """
    products = {node.output[0] for node in function.node if node.op_type == "Mul"}
    nodes = []
    for node in function.node:
        if node.op_type == "Sub" and node.input[1] in products:
            nodes.append(onnx.helper.make_node("Abs", [node.input[1]], [f"{node.input[1]}_rounded"]))
            node.input[1] = nodes[-1].output[0]
        nodes.append(node)
    replace_nodes(function, nodes)


def _raise_subnormals(graph: Any) -> None:
    for node in graph.node:
        if node.op_type != "Constant" or (value := node.attribute[0].t).data_type != onnx.TensorProto.FLOAT:
            continue
        array = onnx.numpy_helper.to_array(value)
        if (subnormal := (array > 0) & (array < _SMALLEST)).any():
            value.CopyFrom(onnx.numpy_helper.from_array(np.where(subnormal, _SMALLEST, array), value.name))
