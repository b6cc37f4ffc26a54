"""The target "openvino": standard operators alone, for OpenVINO's CPU plugin.

OpenVINO reads no ONNX functions, so they are inlined. Its DequantizeLinear takes whole blocks of tensors of a static
shape. FP4 and INT8 weights of it stay packed in memory, and matmuls decode them. Functions compute other weights, rows
of embeddings, and activations. OpenVINO decodes a constant of functions once, when it compiles the model; an FP8
constant of DequantizeLinear would be decoded in each call.

OpenVINO reads subnormal constants as zero. A scale must not be zero, because values are divided by it: the smallest
scale becomes 2**-126.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.files import raise_opset, used_names
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.function_bodies import add_bodies
from pt2mx.pt2e.onnx.nodes import DequantizeMX, graphs_in
from pt2mx.pt2e.onnx.standard import NATIVE_OPSET, dequantize_weights, is_native

inliner = import_extra("onnx.inliner", "onnx")

#: elements of weights that OpenVINO's matmuls decode
_PACKED = ("fp4_e2m1", "int8", "int8_full")
_SMALLEST = np.finfo(np.float32).smallest_normal


def to_openvino(model: Any) -> Any:
    """Return a model with the values of the nodes of the domain `pt2mx`, in standard operators.

    A model of a lower opset is converted to 24.
    """
    model = raise_opset(model, NATIVE_OPSET)
    used = used_names(model.graph)
    for graph in graphs_in(model.graph):
        dequantize_weights(graph, used, _stays_packed, of_rows=False)
    model = inliner.inline_local_functions(add_bodies(model))
    for graph in graphs_in(model.graph):
        _raise_subnormals(graph)
    return model


def _stays_packed(attributes: DequantizeMX) -> bool:
    whole = attributes.length > 0 and attributes.length % attributes.spec.block_size == 0
    return is_native(attributes) and attributes.spec.element.name in _PACKED and whole


def _raise_subnormals(graph: Any) -> None:
    for node in graph.node:
        if node.op_type != "Constant" or (value := node.attribute[0].t).data_type != onnx.TensorProto.FLOAT:
            continue
        array = onnx.numpy_helper.to_array(value)
        if (subnormal := (array > 0) & (array < _SMALLEST)).any():
            value.CopyFrom(onnx.numpy_helper.from_array(np.where(subnormal, _SMALLEST, array), value.name))
