"""ONNX models in files: read, converted, checked and written as a whole; the names and tensors of their graphs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.output import whole_file
from pt2mx.pt2e.onnx.nodes import graphs_in

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

onnx = import_extra("onnx", "onnx")

#: the most bytes that protobuf writes to a file
_LIMIT = 2**31 - 1
#: the lowest opset and IR version of a model with our functions: IR 10 has overloads of functions
OPSET, IR_VERSION = 18, 10
#: operators that only rearrange their input
_REARRANGING = ("Transpose", "Identity", "Gather")
#: types of codes for which torch has no counterpart, or calculates with their values
_CODES = {getattr(onnx.TensorProto, name) for name in ("FLOAT4E2M1", "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E8M0")}
#: constants of at least this many values: inference sees their shape and not their values
_LARGE = 256


def read_model(path: str | os.PathLike[str]) -> ModelProto:
    """Read an ONNX file, with its external data."""
    try:
        model = onnx.load(os.fspath(path))
    except Exception as error:  # protobuf's error for a damaged file, or onnx's error for missing data
        raise MXError(f"{str(path)!r} is no ONNX file that can be read: {first_line(error)}") from None
    if not model.graph.node:
        raise MXError(f"{os.fspath(path)!r} holds no graph: give the ONNX file of a model")
    return model


def opset_of(model: ModelProto) -> int:
    """Return the version of ONNX's own operators that a model imports."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def raise_opset(model: ModelProto, opset: int = OPSET) -> ModelProto:
    """Return a model of at least this opset: the model itself, or a conversion of it."""
    entries = [*model.opset_import]
    for graph in graphs_in(model.graph):
        entries += graph.node
    for entry in entries:
        if entry.domain == "ai.onnx":  # another spelling
            entry.domain = ""
    # before IR 4 every initializer is an input too, and the converter would treat it as one
    if model.ir_version < 4:
        inputs = inputs_of(model.graph)
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = 4
    if opset_of(model) < opset:
        try:
            model = onnx.version_converter.convert_version(model, opset)
        except Exception as error:
            raise MXError(
                f"opset {opset_of(model)} cannot be converted to {opset}, which MX functions need: "
                f"{first_line(error)}; export the model anew"
            ) from None
    needed = onnx.helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(model.ir_version, needed, IR_VERSION)
    return model


def inputs_of(graph: GraphProto) -> list[ValueInfoProto]:
    """Return the inputs of a graph that have no default."""
    initializers = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in initializers]


def constants_of(graph: GraphProto) -> dict[str, TensorProto]:
    """Return the initializers of a graph by name, without those that are defaults of inputs."""
    inputs = {value.name for value in graph.input}
    return {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}


def producers_of(graph: GraphProto) -> dict[str, NodeProto]:
    """Return the node that computes each value of a graph, by the name of the value."""
    producers: dict[str, NodeProto] = {}
    for node in graph.node:
        producers |= dict.fromkeys(filter(None, node.output), node)
    return producers


def import_domain(model: ModelProto, domain: str, version: int) -> None:
    """Let a model import a domain of operators, which it may do already."""
    if domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(domain, version))


def check_model(model: ModelProto, name: str) -> None:
    """Raise an MXError for a model that onnx's checker rejects. A model larger than a file is not checked."""
    if _exceeds_file(model):
        return
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise MXError(f"{name} is not valid: {first_line(error)}") from None


def serialized(model: ModelProto) -> bytes:
    """Return the bytes of a model's file."""
    if _exceeds_file(model):
        raise MXError(f"the model has more than the {_LIMIT:,} bytes of an ONNX file: quantize more of it, or parts")
    check_model(model, "the model that was written")
    return model.SerializeToString()


def write_model(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model as one file, which replaces `path` when it is complete."""
    data = serialized(model)
    with whole_file(path) as file:
        file.write(data)


def _exceeds_file(model: ModelProto) -> bool:
    try:
        return model.ByteSize() > _LIMIT
    except Exception:  # protobuf's EncodeError, for a model that is too large to count its bytes
        return True


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def used_names(graph: GraphProto) -> set[str]:
    """Return the names of the nodes and tensors of a graph and its subgraphs."""
    used: set[str] = set()
    for each in graphs_in(graph):
        used |= {value.name for value in (*each.input, *each.output, *each.initializer)}
        for node in each.node:
            used |= {node.name, *node.input, *node.output}
    return used


def fresh_name(name: str, used: set[str]) -> str:
    """Return `name`, or the first of `name_1`, ... that is not in use, and add it to the names in use."""
    fresh, i = name, 0
    while fresh in used:
        i += 1
        fresh = f"{name}_{i}"
    used.add(fresh)
    return fresh


def rename_dims(model: ModelProto, rename: Callable[[str], str]) -> None:
    """Rename the dynamic dimensions of a model's values by a function of their expressions."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = rename(dim.dim_param)


def remove_unused(graph: GraphProto) -> None:
    """Remove initializers that neither the graph nor its subgraphs use, and the nodes that rearranged them."""
    used: set[str] = set()
    for each in graphs_in(graph):
        used |= {output.name for output in each.output}
        for node in each.node if each is not graph else ():
            used |= set(node.input)
    kept = []
    for node in reversed(graph.node):
        if node.op_type not in _REARRANGING or not used.isdisjoint(node.output):
            used |= set(node.input)
            kept.append(node)
    replace_nodes(graph, kept[::-1])
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(initializers)


def replace_nodes(graph: GraphProto | FunctionProto, nodes: Iterable[NodeProto]) -> None:
    """Give a graph or a function other nodes, some of which it may have."""
    nodes = list(nodes)  # of a slice of the graph they would be gone
    del graph.node[:]
    graph.node.extend(nodes)


class TensorType(NamedTuple):
    """The `TensorProto` data type and the shape of a tensor; None for what is unknown, also for a single dimension."""

    dtype: int | None = None
    shape: tuple[int | None, ...] | None = None


def tensor_types(model: ModelProto, is_identity: Callable[[NodeProto], bool] | None = None) -> dict[str, TensorType]:
    """Infer the types of the tensors of a model's graph, by name.

    Args:
        model: the model. It is not changed, and large constants are not copied.
        is_identity: true for nodes of a domain unknown to inference whose output has the type of their input.
    """
    constants = constants_of(model.graph).values()
    graph = onnx.GraphProto(name="types", input=model.graph.input, output=model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if math.prod(tensor.dims) < _LARGE)
    graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in constants)
    for node in model.graph.node:
        plain = is_identity is not None and is_identity(node)
        graph.node.append(onnx.helper.make_node("Identity", node.input, node.output) if plain else node)
    light = onnx.ModelProto(ir_version=model.ir_version, graph=graph, functions=model.functions)
    light.opset_import.extend(model.opset_import)
    try:
        inferred = onnx.shape_inference.infer_shapes(light).graph
    except onnx.shape_inference.InferenceError as error:
        raise MXError(f"the types of the model's tensors cannot be inferred: {first_line(error)}") from None
    return {value.name: _type(value) for value in (*inferred.input, *inferred.value_info, *inferred.output)}


def known_types(model: ModelProto) -> dict[str, TensorType]:
    """Return the types that a model states for tensors of its graph, by name."""
    graph = model.graph
    types = {value.name: _type(value) for value in (*graph.value_info, *graph.input)}
    for tensor in graph.initializer:
        types[tensor.name] = TensorType(tensor.data_type, tuple(tensor.dims))
    return types


def _type(value: ValueInfoProto) -> TensorType:
    kind = value.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
    return TensorType(kind.elem_type or None, shape if kind.HasField("shape") else None)


def as_torch(constant: TensorProto) -> Tensor:
    """Return the values of a constant; for ONNX's types of FP4, FP8 and E8M0 their codes, uint8, one in each byte."""
    values = onnx.numpy_helper.to_array(constant)
    if constant.data_type in _CODES:
        values = values.view(np.uint8)
    if constant.data_type == onnx.TensorProto.BFLOAT16:  # NumPy has bfloat16 only as a dtype of ml_dtypes
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(values))


def from_torch(values: Tensor, name: str) -> TensorProto:
    """Return a constant with that name."""
    values = values.contiguous()
    if values.dtype != torch.bfloat16:
        return onnx.numpy_helper.from_array(values.numpy(), name)
    raw = values.view(torch.int16).numpy().tobytes()
    return onnx.helper.make_tensor(name, onnx.TensorProto.BFLOAT16, values.shape, raw, raw=True)
