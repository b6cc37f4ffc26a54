"""The data types and shapes of a model's tensors, as far as they can be inferred."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.opsets import first_line

#: values of a constant from which inference sees its shape alone
_LARGE = 256


class TensorType(NamedTuple):
    """The `TensorProto` data type of a tensor, None where it is unknown, and its shape, with None for what is."""

    dtype: int | None = None
    shape: tuple[int | None, ...] | None = None


def tensor_types(model: ModelProto, is_identity: Callable[[NodeProto], bool] | None = None) -> dict[str, TensorType]:
    """The types of the tensors of a model's graph by name.

    Args:
        model: the model; it stays as it is, and large constants are not copied.
        is_identity: true of the nodes, of a domain that inference does not know, whose output is of the type of their
            input.

    Raises:
        MXError: where nodes do not fit together.
    """
    fed = {value.name for value in model.graph.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in fed]
    graph = GraphProto(name="types", input=model.graph.input, output=model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if math.prod(tensor.dims) < _LARGE)
    graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in constants)
    for node in model.graph.node:
        plain = is_identity is not None and is_identity(node)
        graph.node.append(helper.make_node("Identity", node.input, node.output) if plain else node)
    light = ModelProto(ir_version=model.ir_version, graph=graph, functions=model.functions)
    light.opset_import.extend(model.opset_import)
    try:
        inferred = onnx.shape_inference.infer_shapes(light).graph
    except onnx.shape_inference.InferenceError as error:
        raise MXError(f"the types of the model's tensors cannot be inferred: {first_line(error)}") from None
    return {value.name: _type(value) for value in (*inferred.input, *inferred.value_info, *inferred.output)}


def _type(value: onnx.ValueInfoProto) -> TensorType:
    kind = value.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
    return TensorType(kind.elem_type or None, shape if kind.HasField("shape") else None)
