"""The constants of a float file, whatever exporters wrote them as: all initializers."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from pt2mx.pt2e.onnx.float_operators import attributes_of

#: operators whose results are constants where their inputs are; a transposition stays, for the sake of who shares its
#: input
_FOLDED = ("Cast", "CastLike", "Concat", "Flatten", "Reshape", "Squeeze", "Unsqueeze")


def hoist_constants(model: ModelProto) -> None:
    """Make an initializer of each `Constant` node of a model's graph that holds numbers, and of the results of nodes
    that cast or reshape constants."""
    graph = model.graph
    fed = {value.name for value in graph.input}
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in fed}
    kept: list[NodeProto] = []
    for node in graph.node:
        made = _made(model, node, constants) if node.domain == "" else []
        if not made:
            kept.append(node)
        constants |= {tensor.name: tensor for tensor in made}
        graph.initializer.extend(made)
    del graph.node[:]
    graph.node.extend(kept)


def _made(model: ModelProto, node: NodeProto, constants: dict[str, TensorProto]) -> list[TensorProto]:
    """The constants that a node stands for; none where it does not."""
    if node.op_type == "Constant":
        value = _value(node)
        return [] if value is None else [_named(value, node.output[0])]
    if node.op_type not in _FOLDED or not all(name in constants for name in node.input if name):
        return []
    results = [onnx.ValueInfoProto(name=name) for name in node.output]
    alone = GraphProto(name="node", node=[node], output=results)
    alone.initializer.extend(constants[name] for name in node.input if name)
    whole = helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        values = ReferenceEvaluator(whole).run(None, {})
    except Exception:  # a shape that does not fit: runtimes say so
        return []
    return [numpy_helper.from_array(v, name) for v, name in zip(values, node.output, strict=True)]


def _value(node: NodeProto) -> TensorProto | None:
    """The value of a `Constant` node; None of a sparse one, of text, and where there is none."""
    name, value = next(iter(attributes_of(node).items()), ("", None))
    if name == "value":
        return value
    kinds = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
    return numpy_helper.from_array(np.array(value, kinds[name])) if name in kinds else None


def _named(tensor: TensorProto, name: str) -> TensorProto:
    made = TensorProto.FromString(tensor.SerializeToString())
    made.name = name
    return made
