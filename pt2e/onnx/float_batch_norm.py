"""Batch norms right after a convolution, folded into its weight before that is quantized, as in PyTorch's flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from pt2mx.pt2e.onnx.float_operators import attributes_of
from pt2mx.pt2e.onnx.names import names_in, unused
from pt2mx.pt2e.onnx.nodes import graphs_in

#: convolution -> the dimension of its weight that counts output channels
_OUT = {"Conv": 0, "ConvTranspose": 1}


def fold_batch_norms(model: ModelProto) -> None:
    """Fold each batch norm with constant parameters behind a convolution that has a constant weight of its own and
    whose output nothing else reads. Products and sums are in float64."""
    graph = model.graph
    fed = {value.name for value in graph.input}
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in fed}
    readers = Counter(name for each in graphs_in(graph) for node in each.node for name in node.input)
    readers.update(output.name for each in graphs_in(graph) for output in each.output)
    producers = {name: node for node in graph.node for name in node.output}
    taken = names_in(graph)
    kept: list[NodeProto] = []
    for node in graph.node:
        before = producers.get(node.input[0]) if node.input else None
        if before is not None and _is_foldable(before, node, constants, readers):
            bias = _fold(before, node, constants)
            bias.name = unused(f"{node.output[0]}_bias", taken)
            graph.initializer.append(bias)
            constants[bias.name] = bias
            before.input[2:] = [bias.name]
            before.output[0] = node.output[0]
            producers[node.output[0]] = before
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _is_foldable(
    conv: NodeProto, norm: NodeProto, constants: Mapping[str, TensorProto], readers: Mapping[str, int]
) -> bool:
    grouped = conv.op_type == "ConvTranspose" and attributes_of(conv).get("group", 1) != 1
    return (
        conv.op_type in _OUT
        and not grouped
        and norm.op_type == "BatchNormalization"
        and len([name for name in norm.output if name]) == 1  # of training there are more
        and all(name in constants for name in (*conv.input[1:], *norm.input[1:]))
        and readers[conv.output[0]] == readers[conv.input[1]] == 1
    )


def _fold(conv: NodeProto, norm: NodeProto, constants: Mapping[str, TensorProto]) -> TensorProto:
    """Scale the weight of a convolution, and return its bias, which has no name yet."""
    weight = constants[conv.input[1]]
    values, *given = (numpy_helper.to_array(constants[name]).astype(np.float64) for name in conv.input[1:])
    gain, shift, mean, variance = (numpy_helper.to_array(constants[name]).astype(np.float64) for name in norm.input[1:])
    factor = gain / np.sqrt(variance + attributes_of(norm).get("epsilon", 1e-5))
    axis = _OUT[conv.op_type]
    scaled = values * factor.reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    dtype = numpy_helper.to_array(weight).dtype
    weight.CopyFrom(numpy_helper.from_array(scaled.astype(dtype), weight.name))
    bias = ((given[0] if given else 0.0) - mean) * factor + shift
    return numpy_helper.from_array(bias.astype(dtype))
