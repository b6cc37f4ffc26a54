"""Describe an ONNX file for `pt2mx inspect`: packed weights and quantized activations by pt2mx's own nodes."""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING

from pt2mx.analysis.sums import exponent_bytes
from pt2mx.extras import import_extra
from pt2mx.kernels.packing import unpacked_length
from pt2mx.pt2e.inspect.schema import FileInfo, PackedWeightInfo, TensorInfo, counted, format_of, scale_counts
from pt2mx.pt2e.onnx.files import as_torch, constants_of, inputs_of, read_model
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX, graphs_in

if TYPE_CHECKING:
    from onnx import TensorProto, ValueInfoProto

onnx = import_extra("onnx", "onnx")


def onnx_info(path: str | os.PathLike[str]) -> FileInfo:
    """Describe an ONNX file. In a dialect without pt2mx's nodes the packed weights are among the other tensors.

    Raises:
        MXError: for a file that is no ONNX model.
    """
    model = read_model(path)
    constants = {name: tensor for graph in graphs_in(model.graph) for name, tensor in constants_of(graph).items()}
    weights: dict[str, PackedWeightInfo] = {}
    packed: set[str] = set()
    for node, attributes in DequantizeMX.nodes_in(model):
        if all(name in constants for name in node.input):
            weights[node.input[0]] = _weight([constants[name] for name in node.input], attributes)
            packed |= set(node.input)
    operators = []
    for node in (node for graph in graphs_in(model.graph) for node in graph.node):
        name = node.op_type.partition(".")[0]  # the name of a function has the spec behind it
        operators.append(f"{node.domain}.{name}" if node.domain else name)
    return FileInfo(
        file=str(path),
        kind="ONNX model",
        bytes=os.stat(path).st_size,
        origin=None,
        inputs=tuple(map(_input, inputs_of(model.graph))),
        weights=tuple(weights.values()),
        tensors=tuple(_tensor(tensor) for name, tensor in constants.items() if name not in packed),
        operators=counted(operators),
        activations=counted(str(attributes.spec) for _, attributes in FakeQuantizeMX.nodes_in(model)),
    )


def _weight(parts: list[TensorProto], attributes: DequantizeMX) -> PackedWeightInfo:
    codes, stored, *tensor_scale = map(as_torch, parts)
    spec = attributes.spec
    axis = spec.axis % codes.dim()
    shape = list(codes.shape)
    shape[axis] = attributes.length if attributes.length > 0 else unpacked_length(shape[axis], spec.element.bits)
    scales, nan = scale_counts(exponent_bytes(stored, spec, tensor_scale[0] if tensor_scale else None))
    name = parts[0].name.removesuffix("_native").removesuffix("_data")
    return PackedWeightInfo(name, format_of(spec), axis, tuple(shape), sum(map(_nbytes, parts)), scales, nan)


def _nbytes(tensor: TensorProto) -> int:
    values = prod(tensor.dims)
    if tensor.data_type == onnx.TensorProto.FLOAT4E2M1:
        return -(-values // 2)
    return values * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _tensor(tensor: TensorProto) -> TensorInfo:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return TensorInfo(tensor.name, str(dtype), tuple(tensor.dims), _nbytes(tensor))


def _input(value: ValueInfoProto) -> TensorInfo:
    kind = value.type.tensor_type
    shape = tuple(size.dim_param or size.dim_value for size in kind.shape.dim)
    return TensorInfo(value.name, str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape)
