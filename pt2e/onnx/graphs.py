"""Graphs of ONNX models: the names in use, unused initializers, and the inferred types of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.files import first_line
from pt2mx.pt2e.onnx.nodes import graphs_in

#: operators that only rearrange their input
_REARRANGING = ("Transpose", "Identity", "Gather")
#: constants of at least this many values: inference sees their shape and not their values
_LARGE = 256


def used_names(graph: GraphProto) -> set[str]:
    """Return the names of the nodes and tensors of a graph and its subgraphs."""
    used: set[str] = set()
    for each in graphs_in(graph):
        used |= {value.name for value in (*each.input, *each.output, *each.initializer)}
        used |= {name for node in each.node for name in (node.name, *node.input, *node.output)}
    return used


def fresh_name(name: str, used: set[str]) -> str:
    """Return `name`, or the first of `name_1`, ... that is not in use, and add it to the names in use."""
    candidates = (name if i == 0 else f"{name}_{i}" for i in range(len(used) + 1))
    fresh = next(candidate for candidate in candidates if candidate not in used)
    used.add(fresh)
    return fresh


def remove_unused(graph: GraphProto) -> None:
    """Remove initializers that neither the graph nor its subgraphs use, and the nodes that rearranged them."""
    subgraphs = [each for each in graphs_in(graph) if each is not graph]
    used = {name for subgraph in subgraphs for node in subgraph.node for name in node.input}
    used |= {output.name for each in (graph, *subgraphs) for output in each.output}
    kept = []
    for node in reversed(graph.node):
        if node.op_type not in _REARRANGING or not used.isdisjoint(node.output):
            used |= set(node.input)
            kept.append(node)
    nodes = kept[::-1]
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(initializers)


class TensorType(NamedTuple):
    """The `TensorProto` data type and the shape of a tensor; None for what is unknown, also for a single dimension."""

    dtype: int | None = None
    shape: tuple[int | None, ...] | None = None


def tensor_types(model: ModelProto, is_identity: Callable[[NodeProto], bool] | None = None) -> dict[str, TensorType]:
    """Infer the types of the tensors of a model's graph, by name.

    Args:
        model: the model. It is not changed, and large constants are not copied.
        is_identity: true for nodes of a domain unknown to inference whose output has the type of their input.

    Raises:
        MXError: where nodes do not fit together.
    """
    inputs = {value.name for value in model.graph.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in inputs]
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
