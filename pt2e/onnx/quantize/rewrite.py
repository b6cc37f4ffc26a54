"""Rewrite a float ONNX graph as planned: `DequantizeMX` after packed weights, `FakeQuantizeMX` after activations.

Each constant is packed and dequantized once for each spec of its users. Rows of an embedding are gathered before they
are dequantized. Float constants that become unused are removed.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto, helper

from pt2mx.errors import MXError
from pt2mx.functional import quantize_mx, tensor_scale_mx
from pt2mx.pt2e.onnx.files import (
    as_torch,
    fresh_name,
    from_torch,
    import_domain,
    remove_unused,
    replace_nodes,
    used_names,
)
from pt2mx.pt2e.onnx.nodes import DOMAIN, VERSION, DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.quantize.graph import FloatGraph, Source
from pt2mx.pt2e.onnx.quantize.plan import NodePlan, QuantizedOperand
from pt2mx.spec import MXSpec


class Rewriter:
    """Rewrites the graph of the plans, and with it the model."""

    def __init__(self, graph: FloatGraph) -> None:
        self._graph = graph
        self._used = used_names(graph.graph)
        #: constant, spec -> names of its codes and scales
        self._packed: dict[tuple[str, MXSpec], list[str]] = {}
        #: tensor, spec -> name of the tensor that replaces it
        self._quantized: dict[tuple[str, MXSpec], str] = {}
        #: the nodes of the new graph, in order
        self._nodes: list[NodeProto] = []

    def apply(self, plans: list[NodePlan]) -> None:
        """Rewrite the model as planned."""
        import_domain(self._graph.model, DOMAIN, VERSION)
        by_name = {plan.node.name: plan for plan in plans if plan}
        for node in self._graph.graph.node:
            plan = by_name.get(node.name)
            if plan is None:
                self._nodes.append(node)
                continue
            output = node.output[0]
            if plan.output is not None:
                node.output[0] = fresh_name(f"{output}_float", self._used)
            if node.op_type == "Gather" and plan.operands:
                self._gather(node, plan.operands[0])
            else:
                self._quantize(node, plan)
            if plan.output is not None:
                self._add(self._fake_quantize(output, plan.output), [node.output[0]], output)
        replace_nodes(self._graph.graph, self._nodes)
        remove_unused(self._graph.graph)

    def _quantize(self, node: NodeProto, plan: NodePlan) -> None:
        for operand in plan.operands:
            if operand.source is None:
                name = self._fake_quantized(operand.tensor, operand.spec)
            else:
                name = self._through(self._dequantized(operand.source, operand.spec), operand)
            node.input[operand.operand.position] = name
        self._nodes.append(node)

    def _fake_quantized(self, tensor: str, spec: MXSpec) -> str:
        """Return the name of a fake-quantized tensor; the node is inserted before the first user."""
        if (tensor, spec) not in self._quantized:
            output = fresh_name(f"{tensor}_mx", self._used)
            self._add(self._fake_quantize(tensor, spec), [tensor], output)
            self._quantized[tensor, spec] = output
        return self._quantized[tensor, spec]

    def _fake_quantize(self, tensor: str, spec: MXSpec) -> FakeQuantizeMX:
        shape = self._graph.shape(tensor)
        last = shape is not None and spec.axis in (-1, len(shape) - 1)
        length = None if shape is None else shape[spec.axis]
        return FakeQuantizeMX(spec.replace(axis=-1) if last else spec, -1 if length is None else length)

    def _dequantized(self, source: Source, spec: MXSpec) -> str:
        constant = source.constant
        if (constant.name, spec) not in self._quantized:
            output = fresh_name(f"{constant.name}_mx", self._used)
            self._add(_dequantize(constant, spec), self._codes(constant, spec), output)
            self._quantized[constant.name, spec] = output
        return self._quantized[constant.name, spec]

    def _through(self, name: str, operand: QuantizedOperand) -> str:
        """Copy the nodes between a constant and the operand, and return the name of their result."""
        for node in operand.source.chain if operand.source else ():
            key = node.output[0], operand.spec
            if key not in self._quantized:
                copy = NodeProto.FromString(node.SerializeToString())
                copy.input[0], copy.output[0] = name, fresh_name(f"{node.output[0]}_mx", self._used)
                copy.name = fresh_name(f"{node.name}_mx", self._used)
                self._nodes.append(copy)
                self._quantized[key] = copy.output[0]
            name = self._quantized[key]
        return name

    def _gather(self, node: NodeProto, operand: QuantizedOperand) -> None:
        """Gather rows of codes and of scales, and dequantize these."""
        if operand.source is None:
            raise MXError(f"{node.name}: the rows of an embedding must be constant")
        constant, rows = operand.source.constant, []
        if operand.spec.block_rows > 1:
            raise MXError(f"{node.name}: {operand.spec} has blocks of several rows, and an embedding reads single rows")
        codes, scale, *tensor_scale = self._codes(constant, operand.spec)
        for packed in (codes, scale):
            rows.append(fresh_name(f"{node.output[0]}_{packed}", self._used))
            name = fresh_name(f"{node.name}_{packed}", self._used)
            self._nodes.append(helper.make_node("Gather", [packed, node.input[1]], rows[-1:], name, axis=0))
        self._add(_dequantize(constant, operand.spec), [*rows, *tensor_scale], node.output[0])

    def _codes(self, constant: TensorProto, spec: MXSpec) -> list[str]:
        """Return the names of the initializers with a constant's codes, scales and, where its format has one, tensor
        scale."""
        if (constant.name, spec) not in self._packed:
            values = as_torch(constant)
            parts = {"tensor_scale": tensor_scale_mx(values, spec)} if spec.has_tensor_scale else {}
            scale, codes = quantize_mx(values, spec, tensor_scale=parts.get("tensor_scale"))
            names = []
            for suffix, values in {"codes": codes, "scale": scale, **parts}.items():
                names.append(fresh_name(f"{constant.name}_{suffix}", self._used))
                self._graph.graph.initializer.append(from_torch(values, names[-1]))
            self._packed[constant.name, spec] = names
        return self._packed[constant.name, spec]

    def _add(self, node: FakeQuantizeMX | DequantizeMX, inputs: list[str], output: str) -> None:
        self._nodes.append(node.make(inputs, output, fresh_name(f"{output}_node", self._used)))


def _dequantize(constant: TensorProto, spec: MXSpec) -> DequantizeMX:
    last = spec.axis == len(constant.dims) - 1
    length = constant.dims[spec.axis]
    return DequantizeMX(spec.replace(axis=-1) if last else spec, length, constant.data_type)
