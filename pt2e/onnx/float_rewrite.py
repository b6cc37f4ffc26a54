"""The rewriting of a float ONNX graph by a plan: packed weights behind `DequantizeMX`, activations behind
`FakeQuantizeMX`.

A constant is packed once for each spec that its readers ask for, and dequantized once for each; rows of an embedding
are gathered before they are decoded. A float constant goes when nothing reads it any more.
"""

from __future__ import annotations

import numpy as np
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

from pt2mx.functional import quantize_mx
from pt2mx.pt2e.onnx.float_graph import FloatGraph, Source
from pt2mx.pt2e.onnx.float_plan import NodePlan, QuantizedOperand
from pt2mx.pt2e.onnx.names import names_in, unused
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.unread import remove_unread
from pt2mx.spec import MXSpec


class Rewriter:
    """The rewriting of one graph.

    Args:
        graph: that of the plans; its model is changed.
    """

    def __init__(self, graph: FloatGraph) -> None:
        self._graph = graph
        self._taken = names_in(graph.graph)
        #: constant, spec -> names of its codes and scales
        self._packed: dict[tuple[str, MXSpec], tuple[str, str]] = {}
        #: tensor, spec -> name of what is read in its place
        self._quantized: dict[tuple[str, MXSpec], str] = {}
        #: the new order of nodes
        self._nodes: list[NodeProto] = []

    def apply(self, plans: list[NodePlan]) -> None:
        """Change the model as planned."""
        by_name = {plan.node.name: plan for plan in plans if plan}
        for node in self._graph.graph.node:
            plan = by_name.get(node.name)
            if plan is None:
                self._nodes.append(node)
                continue
            output = node.output[0]
            if plan.output is not None:
                node.output[0] = unused(f"{output}_float", self._taken)
            if node.op_type == "Gather" and plan.operands:
                self._gather(node, plan.operands[0])
            else:
                self._quantize(node, plan)
            if plan.output is not None:
                self._add(self._fake_quantize(output, plan.output), [node.output[0]], output)
        del self._graph.graph.node[:]
        self._graph.graph.node.extend(self._nodes)
        remove_unread(self._graph.graph)

    def _quantize(self, node: NodeProto, plan: NodePlan) -> None:
        for operand in plan.operands:
            if operand.source is None:
                name = self._fake_quantized(operand.tensor, operand.spec)
            else:
                name = self._through(self._dequantized(operand.source, operand.spec), operand)
            node.input[operand.operand.position] = name
        self._nodes.append(node)

    def _fake_quantized(self, tensor: str, spec: MXSpec) -> str:
        """The name of a computed tensor, quantized and dequantized by a node that stands before its first reader."""
        if (tensor, spec) not in self._quantized:
            output = unused(f"{tensor}_mx", self._taken)
            self._add(self._fake_quantize(tensor, spec), [tensor], output)
            self._quantized[tensor, spec] = output
        return self._quantized[tensor, spec]

    def _fake_quantize(self, tensor: str, spec: MXSpec) -> FakeQuantizeMX:
        shape = self._graph.shape(tensor)
        last = shape is not None and spec.axis in (-1, len(shape) - 1)
        length = None if shape is None else shape[spec.axis]
        return FakeQuantizeMX(
            spec.element.name,
            spec.block_size,
            -1 if last else spec.axis,
            -1 if length is None else length,
            spec.scale_mode,
            spec.rounding,
        )

    def _dequantized(self, source: Source, spec: MXSpec) -> str:
        """The name of a constant, dequantized from codes."""
        constant = source.constant
        if (constant.name, spec) not in self._quantized:
            output = unused(f"{constant.name}_mx", self._taken)
            self._add(_dequantize(constant, spec), list(self._codes(constant, spec)), output)
            self._quantized[constant.name, spec] = output
        return self._quantized[constant.name, spec]

    def _through(self, name: str, operand: QuantizedOperand) -> str:
        """The name of a dequantized constant behind copies of the nodes between the constant and the operand."""
        for node in operand.source.chain if operand.source else ():
            key = node.output[0], operand.spec
            if key not in self._quantized:
                copy = NodeProto.FromString(node.SerializeToString())
                copy.input[0], copy.output[0] = name, unused(f"{node.output[0]}_mx", self._taken)
                copy.name = unused(f"{node.name}_mx", self._taken)
                self._nodes.append(copy)
                self._quantized[key] = copy.output[0]
            name = self._quantized[key]
        return name

    def _gather(self, node: NodeProto, operand: QuantizedOperand) -> None:
        """Gather rows of codes and of scales, and dequantize those."""
        assert operand.source is not None  # a plan has no other
        constant, rows = operand.source.constant, []
        for packed in self._codes(constant, operand.spec):
            rows.append(unused(f"{node.output[0]}_{packed}", self._taken))
            name = unused(f"{node.name}_{packed}", self._taken)
            self._nodes.append(helper.make_node("Gather", [packed, node.input[1]], rows[-1:], name, axis=0))
        self._add(_dequantize(constant, operand.spec), rows, node.output[0])

    def _codes(self, constant: TensorProto, spec: MXSpec) -> tuple[str, str]:
        """The names of the initializers that hold a constant's codes and scales."""
        if (constant.name, spec) not in self._packed:
            scale, codes = quantize_mx(as_torch(constant), spec)
            names = []
            for suffix, values in (("codes", codes), ("scale", scale)):
                names.append(unused(f"{constant.name}_{suffix}", self._taken))
                self._graph.graph.initializer.append(numpy_helper.from_array(values.contiguous().numpy(), names[-1]))
            self._packed[constant.name, spec] = names[0], names[1]
        return self._packed[constant.name, spec]

    def _add(self, made: FakeQuantizeMX | DequantizeMX, inputs: list[str], output: str) -> None:
        self._nodes.append(made.make(inputs, output, unused(f"{output}_node", self._taken)))


def as_torch(constant: TensorProto) -> torch.Tensor:
    """The values of a float constant."""
    values = numpy_helper.to_array(constant)
    if constant.data_type == TensorProto.BFLOAT16:  # a dtype of ml_dtypes
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(values))


def _dequantize(constant: TensorProto, spec: MXSpec) -> DequantizeMX:
    last = spec.axis == len(constant.dims) - 1
    return DequantizeMX(
        spec.element.name, spec.block_size, -1 if last else spec.axis, constant.dims[spec.axis], constant.data_type
    )
