"""The report of a quantized ONNX file: what became of each node, and the bytes of the constants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto, helper

from pt2mx.pt2e.onnx.float_graph import FloatGraph, graphs_inside
from pt2mx.pt2e.onnx.float_operators import ATEN, OTHER_PRODUCTS
from pt2mx.pt2e.onnx.float_plan import NodePlan, QuantizedOperand
from pt2mx.pt2e.report.agreement import Fidelity
from pt2mx.pt2e.report.report import QuantizationReport
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport
from pt2mx.pt2e.stored_bits import packed_bytes, storage_note


@dataclass(frozen=True)
class OnnxReport(QuantizationReport):
    """The report of a quantized ONNX file.

    Args:
        operators: a row for each node that can be quantized, and for each other product, in the order of execution.
        values: the number of values of all constants.
        bytes_before, bytes_after: of all constants, in the float file and in the quantized one.
        fidelity: how the outputs agree with those of the float file, where batches were given: `sqnr` in dB, `cosine`.
    """

    fidelity: Fidelity | None = None


def rows(graph: FloatGraph, plans: list[NodePlan]) -> tuple[OperatorReport, ...]:
    """The rows of a report, of a graph that has not been rewritten yet."""
    planned = {plan.node.name: plan for plan in plans}
    counted: set[object] = set()
    found: list[OperatorReport] = []
    for node in graph.graph.node:
        if node.name in planned:
            found.append(_row(planned[node.name], counted))
        elif node.op_type in OTHER_PRODUCTS:
            found.append(_left(node, "operator not supported"))
        found += [
            _left(inner, f"inside the sub-graph of {node.name}")
            for inner in _inside(node)
            if inner.op_type in _PRODUCTS
        ]
    return tuple(found)


#: those of `ATEN`, of which a gather is mostly no embedding, and others
_PRODUCTS = (*(name for name in ATEN if name != "Gather"), *OTHER_PRODUCTS)


def _inside(node: NodeProto) -> Iterator[NodeProto]:
    """The nodes of the graphs that a node runs, branches and bodies of loops."""
    for graph in graphs_inside(node):
        for inner in graph.node:
            yield inner
            yield from _inside(inner)


def _left(node: NodeProto, reason: str) -> OperatorReport:
    return OperatorReport(node.name, "", node.op_type, (), reason)


def _row(plan: NodePlan, counted: set[object]) -> OperatorReport:
    operands = [_operand(operand, counted) for operand in plan.operands]
    if plan.output is not None:
        operands.append(OperandReport("output", str(plan.output), None, {}, 0, 0, 0))
    module = plan.module or plan.node.name
    reason = "; ".join(plan.reasons) or None
    return OperatorReport(plan.node.name, module, plan.node.op_type, tuple(operands), reason, plan.remark)


def _operand(operand: QuantizedOperand, counted: set[object]) -> OperandReport:
    """An operand with the storage that it adds to what is `counted`: a constant once, and once in each form."""
    values = before = after = 0
    storage = None
    if operand.source is not None:
        constant = operand.source.constant
        if constant.name not in counted:
            values, before = math.prod(constant.dims), bytes_of(constant)
        if (constant.name, operand.spec) not in counted:
            after = packed_bytes(constant.dims, operand.spec)
        storage = storage_note(constant.dims, operand.spec)
        counted |= {constant.name, (constant.name, operand.spec)}
    return OperandReport(operand.role, str(operand.spec), None, {}, values, before, after, storage)


def bytes_of(constant: TensorProto) -> int:
    """The bytes of the values of a constant."""
    return math.prod(constant.dims) * helper.tensor_dtype_to_np_dtype(constant.data_type).itemsize
