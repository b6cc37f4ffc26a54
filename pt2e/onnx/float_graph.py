"""A float ONNX file as rewriting needs it: one opset, constants by name, the types of tensors, and who reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.files import check_model, read_model
from pt2mx.pt2e.onnx.float_batch_norm import fold_batch_norms
from pt2mx.pt2e.onnx.float_constants import hoist_constants
from pt2mx.pt2e.onnx.float_operators import attributes_of
from pt2mx.pt2e.onnx.names import unused
from pt2mx.pt2e.onnx.nodes import graphs_in
from pt2mx.pt2e.onnx.opsets import first_line, raise_opset
from pt2mx.pt2e.onnx.shapes import TensorType, tensor_types

#: domains whose nodes say that a file is quantized already
_QUANTIZED = ("pt2mx", "com.amd.quark", "com.vai.quantize")
#: operators that keep the values that they read
_REARRANGING = ("Transpose", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
#: operators that pass a softmax's probabilities on: casts, masks, other shapes
_PASSING = frozenset({
    "Cast", "Identity", "Dropout", "Where", "Mul", "Div", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand",
    "Flatten", "Slice", "Concat",
})  # fmt: skip


def read_float(path: str | os.PathLike[str]) -> ModelProto:
    """Read a float ONNX file, with its external data, and bring it to an opset that our functions run at.

    Functions of the model are inlined, constants become initializers, batch norms are folded, and each node
    gets a name of its own.

    Raises:
        MXError: where the file is no ONNX model, or one that is not valid, where it cannot be converted, and where it
            is quantized already.
    """
    model = read_model(path)
    for node in (node for graph in graphs_in(model.graph) for node in graph.node):
        if node.domain in _QUANTIZED:
            raise MXError(f"{node.op_type} {node.name!r} of domain {node.domain!r}: the file is quantized already")
    return _current(model)


def _current(model: ModelProto) -> ModelProto:
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:
            raise MXError(f"the functions of the model cannot be inlined: {first_line(error)}") from None
    model = raise_opset(model)
    check_model(model, "the float model")
    hoist_constants(model)
    fold_batch_norms(model)
    taken: set[str] = set()
    for i, node in enumerate(model.graph.node):
        node.name = unused(node.name or f"{node.op_type}_{i}", taken)
    return model


def graphs_inside(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs inside a node (If, Loop, Scan), and those inside their nodes."""
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            yield from graphs_in(graph)


@dataclass(frozen=True)
class Source:
    """The constant that a tensor is, and the Transpose and Identity nodes from it to the tensor, in order."""

    constant: TensorProto
    chain: tuple[NodeProto, ...]

    def axis(self, axis: int) -> int:
        """The dimension of the constant, counted from the front, that is `axis` of the tensor."""
        rank = len(self.constant.dims)
        axis = max(axis, -rank) % rank
        for node in reversed(self.chain):
            if node.op_type == "Transpose":
                axis = attributes_of(node).get("perm", list(reversed(range(rank))))[axis]
        return axis


class FloatGraph:
    """The graph of a model that `read_float` returned.

    Args:
        model: the model. `constants`, `defaults` (initializers that are inputs too) and `producers` are by tensor's
            name.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.constants = {t.name: t for t in model.graph.initializer}
        fed = {value.name for value in model.graph.input}
        self.defaults = {name: self.constants.pop(name) for name in fed & set(self.constants)}
        self.producers = {name: node for node in model.graph.node for name in node.output if name}
        self._types = tensor_types(model)

    def source(self, tensor: str) -> Source | None:
        """The constant behind a tensor; None where it is computed."""
        chain: list[NodeProto] = []
        while tensor not in self.constants:
            node = self.producers.get(tensor)
            if node is None or node.op_type not in ("Transpose", "Identity"):
                return None
            chain.insert(0, node)
            tensor = node.input[0]
        return Source(self.constants[tensor], tuple(chain))

    def is_dequantized(self, tensor: str) -> bool:
        """True of what a DequantizeLinear gave, maybe in another shape."""
        node = self.producers.get(tensor)
        while node is not None and node.op_type in _REARRANGING:
            node = self.producers.get(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    def is_probabilities(self, tensor: str) -> bool:
        """True if a tensor is the result of a softmax, maybe cast, masked or in another shape."""
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
        """The `TensorProto` data type of a tensor, None where it is unknown."""
        return self._types.get(tensor, TensorType()).dtype

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """The shape of a tensor, None where it is unknown, and for each length that is."""
        return self._types.get(tensor, TensorType()).shape
