"""A float ONNX file, prepared for quantization, and its graph.

Preparation brings the file to one opset, inlines functions, makes initializers of constants, and folds batch norms.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.files import (
    TensorType,
    check_model,
    constants_of,
    first_line,
    fresh_name,
    producers_of,
    raise_opset,
    read_model,
    replace_nodes,
    tensor_types,
    used_names,
)
from pt2mx.pt2e.onnx.nodes import graphs_in, node_attributes

#: domains whose nodes show that a file is quantized already
_QUANTIZED = ("pt2mx", "com.amd.quark", "com.vai.quantize")
#: operators whose results are constant if their inputs are. A Transpose is not folded, so that its input keeps its
#: other users
_FOLDED = ("Cast", "CastLike", "Concat", "Flatten", "Reshape", "Squeeze", "Unsqueeze")
#: convolution -> the dimension of its weight that counts output channels
_OUT_CHANNELS = {"Conv": 0, "ConvTranspose": 1}
#: operators that keep the values of their input
_REARRANGING = ("Transpose", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
#: operators that pass a softmax's probabilities on: casts, masks, other shapes
_PASSING = frozenset({
    "Cast", "Identity", "Dropout", "Where", "Mul", "Div", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand",
    "Flatten", "Slice", "Concat",
})  # fmt: skip


def read_float(path: str | os.PathLike[str]) -> ModelProto:
    """Read a float ONNX file, with its external data, and prepare it. Each node gets a unique name."""
    model = read_model(path)
    for graph in graphs_in(model.graph):
        for node in graph.node:
            if node.domain in _QUANTIZED:
                raise MXError(f"{node.op_type} {node.name!r} of domain {node.domain!r}: the file is quantized already")
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:
            raise MXError(f"the functions of the model cannot be inlined: {first_line(error)}") from None
    model = raise_opset(model)
    check_model(model, "the float model")
    hoist_constants(model)
    fold_batch_norms(model)
    used: set[str] = set()
    for i, node in enumerate(model.graph.node):
        node.name = fresh_name(node.name or f"{node.op_type}_{i}", used)
    return model


def hoist_constants(model: ModelProto) -> None:
    """Replace each `Constant` node of numbers, and each node that casts or reshapes constants, by an initializer."""
    graph, constants = model.graph, constants_of(model.graph)
    kept: list[NodeProto] = []
    for node in graph.node:
        results = _folded(model, node, constants) if node.domain == "" else []
        if not results:
            kept.append(node)
        constants |= {tensor.name: tensor for tensor in results}
        graph.initializer.extend(results)
    replace_nodes(graph, kept)


def _folded(model: ModelProto, node: NodeProto, constants: dict[str, TensorProto]) -> list[TensorProto]:
    """Return the constant results of a node; none if it computes them from inputs."""
    if node.op_type == "Constant":
        value = _constant_value(node)
        if value is None:
            return []
        named = TensorProto.FromString(value.SerializeToString())
        named.name = node.output[0]
        return [named]
    if node.op_type not in _FOLDED or not all(name in constants for name in node.input if name):
        return []
    results = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = GraphProto(name="node", node=[node], output=results)
    graph.initializer.extend(constants[name] for name in node.input if name)
    one_node = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        values = ReferenceEvaluator(one_node).run(None, {})
    except Exception:  # a shape that does not fit: leave the error to the runtime
        return []
    return [numpy_helper.from_array(v, name) for v, name in zip(values, node.output, strict=True)]


def _constant_value(node: NodeProto) -> TensorProto | None:
    """Return the value of a `Constant` node; None for a sparse tensor, text or no value."""
    name, value = next(iter(node_attributes(node).items()), ("", None))
    if name == "value":
        return value
    kinds = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
    return numpy_helper.from_array(np.array(value, kinds[name])) if name in kinds else None


def fold_batch_norms(model: ModelProto) -> None:
    """Fold each batch norm with constant parameters into the convolution in front of it, as PyTorch's flow does.

    The norm must be the only user of the convolution's output, and the convolution the only user of its constant
    weight. The computation is in float64.
    """
    graph, constants = model.graph, constants_of(model.graph)
    uses: Counter[str] = Counter()
    for each in graphs_in(graph):
        uses.update(output.name for output in each.output)
        for node in each.node:
            uses.update(node.input)
    producers = producers_of(graph)
    used = used_names(graph)
    kept: list[NodeProto] = []
    for node in graph.node:
        before = producers.get(node.input[0]) if node.input else None
        if before is not None and _is_foldable(before, node, constants, uses):
            bias = _fold(before, node, constants)
            bias.name = fresh_name(f"{node.output[0]}_bias", used)
            graph.initializer.append(bias)
            constants[bias.name] = bias
            before.input[2:] = [bias.name]
            before.output[0] = node.output[0]
            producers[node.output[0]] = before
        else:
            kept.append(node)
    replace_nodes(graph, kept)


def _is_foldable(
    conv: NodeProto, norm: NodeProto, constants: Mapping[str, TensorProto], uses: Mapping[str, int]
) -> bool:
    grouped = conv.op_type == "ConvTranspose" and node_attributes(conv).get("group", 1) != 1
    return (
        conv.op_type in _OUT_CHANNELS
        and not grouped
        and norm.op_type == "BatchNormalization"
        and len([name for name in norm.output if name]) == 1  # training has more
        and all(name in constants for name in (*conv.input[1:], *norm.input[1:]))
        and uses[conv.output[0]] == uses[conv.input[1]] == 1
    )


def _fold(conv: NodeProto, norm: NodeProto, constants: Mapping[str, TensorProto]) -> TensorProto:
    """Scale the weight of a convolution, and return its bias, without a name."""
    weight = constants[conv.input[1]]
    names = [*norm.input[1:], *conv.input[1:]]
    tensors = [numpy_helper.to_array(constants[name]).astype(np.float64) for name in names]
    gain, shift, mean, variance, values, *bias = tensors
    factor = gain / np.sqrt(variance + node_attributes(norm).get("epsilon", 1e-5))
    axis = _OUT_CHANNELS[conv.op_type]
    scaled = values * factor.reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    dtype = numpy_helper.to_array(weight).dtype
    weight.CopyFrom(numpy_helper.from_array(scaled.astype(dtype), weight.name))
    folded = ((bias[0] if bias else 0.0) - mean) * factor + shift
    return numpy_helper.from_array(folded.astype(dtype))


@dataclass(frozen=True)
class Source:
    """The constant behind a tensor, and the Transpose and Identity nodes from it to the tensor, in order."""

    constant: TensorProto
    chain: tuple[NodeProto, ...]

    def axis(self, axis: int) -> int:
        """Return the dimension of the constant, counted from the front, that is `axis` of the tensor."""
        rank = len(self.constant.dims)
        axis = max(axis, -rank) % rank
        for node in reversed(self.chain):
            if node.op_type == "Transpose":
                axis = node_attributes(node).get("perm", list(reversed(range(rank))))[axis]
        return axis


class FloatGraph:
    """The graph of a result of `read_float`.

    It maps the names of tensors to `constants`, `defaults` (initializers that are also inputs) and `producers`.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.constants = constants_of(model.graph)
        self.defaults = {t.name for t in model.graph.initializer} - self.constants.keys()
        self.producers = producers_of(model.graph)
        self._types = tensor_types(model)

    def source(self, tensor: str) -> Source | None:
        """Return the constant behind a tensor; None where the tensor is computed."""
        chain: list[NodeProto] = []
        while tensor not in self.constants:
            node = self.producers.get(tensor)
            if node is None or node.op_type not in ("Transpose", "Identity"):
                return None
            chain.insert(0, node)
            tensor = node.input[0]
        return Source(self.constants[tensor], tuple(chain))

    def is_dequantized(self, tensor: str) -> bool:
        """Return whether a tensor is the result of a DequantizeLinear, possibly in another shape."""
        node = self.producers.get(tensor)
        while node is not None and node.op_type in _REARRANGING:
            node = self.producers.get(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    def is_probabilities(self, tensor: str) -> bool:
        """Return whether a tensor is the result of a softmax, possibly cast, masked or in another shape."""
        seen, pending = set(), [tensor]
        while pending:
            current = pending.pop()
            node = self.producers.get(current)
            if current in seen or node is None:
                continue
            seen.add(current)
            if node.op_type in ("Softmax", "LogSoftmax"):
                return True
            if node.op_type in _PASSING:
                pending.extend(node.input)
        return False

    def dtype(self, tensor: str) -> int | None:
        """Return the `TensorProto` data type of a tensor, None where it is unknown."""
        return self._types.get(tensor, TensorType()).dtype

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """Return the shape of a tensor, None where it is unknown, and None for each unknown dimension."""
        return self._types.get(tensor, TensorType()).shape
