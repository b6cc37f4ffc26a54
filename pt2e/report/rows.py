"""The rows of a report, one for each operator; read from a graph, or back from JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import getitem, index
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import captured_operands, named_graph_modules
from pt2mx.fx.graph.node import FakeQuantize, Quantize, called, model_of, node_arg, tensor_of
from pt2mx.fx.graph.qdq import quantize_of, spec_of_dequantize
from pt2mx.fx.graph.source_node import module_name, source_line
from pt2mx.pt2e.flow.accumulators import accumulator_of
from pt2mx.pt2e.flow.packed_weights import storage_note
from pt2mx.pt2e.flow.sizes import ByteCounter, CapturedOperands, Counted, Source, sources_of, sources_of_codes
from pt2mx.pt2e.flow.weights import constants_of, is_constant, weight_statistics
from pt2mx.pt2e.observe.format_observer import CANDIDATES_KEY
from pt2mx.pt2e.observe.observer import STATISTICS_KEY, observer_of
from pt2mx.pt2e.quantizer.annotate import REASON_KEY, REMARK_KEY
from pt2mx.pt2e.quantizer.operators import (
    is_matmul_like,
    operand_node,
    operands_of,
    operator_name,
    operator_path,
    quantizable_operators,
    role_of,
)
from pt2mx.pt2e.report.converted_size import Conversion
from pt2mx.spec import MXSpec


@dataclass(frozen=True)
class OperandReport:
    """One operand of an operator.

    Args:
        role: "activation", "weight", "bias" or "output".
        spec: its format; None: high precision.
        statistics: the statistics of calibration.
        candidates: the same for each candidate of an `MXFormatObserver`.
        values, bytes_before, bytes_after: of a constant; 0 for a computed operand, and for one that an earlier operator
            shares.
        storage: the reason why it takes more bits than its format, if it does.
        tensor_scale: the static scale of the whole tensor, which calibration found; None for a format without, and for
            the scale of each tensor.
        matmuls: names of the matmuls and the like that compute a quantized constant. Conversion computes them once, so
            that they are no operators of the converted model.
    """

    role: str
    spec: str | None
    statistics: QuantizationStatistics | None
    candidates: dict[str, QuantizationStatistics]
    values: int
    bytes_before: int
    bytes_after: int
    storage: str | None = None
    tensor_scale: float | None = None
    matmuls: tuple[str, ...] = ()


@dataclass(frozen=True)
class OperatorReport:
    """One operator.

    Args:
        name: of its node; in a subgraph a path.
        module: the module that calls it.
        operator: its name.
        operands: its operands.
        reason: the reason why it, or an operand, stays in high precision; None if nothing does.
        remark: a note for the user about its quantization.
        source: the line of the model's source that calls it, as `model.py:12`; "" where it is unknown.
        accumulator: the register in which its products are added; None: torch's own sums.
        sums_sqnr: the SQNR in dB of the register's sums against torch's, of values before they are quantized; None
            without calibration.
    """

    name: str
    module: str
    operator: str
    operands: tuple[OperandReport, ...]
    reason: str | None
    remark: str | None = None
    source: str = ""
    accumulator: str | None = None
    sums_sqnr: float | None = None

    @property
    def label(self) -> str:
        """Return the name of its module; outside of modules its node's name, and the line of the source."""
        return self.module or (f"{self.name} ({self.source})" if self.source else self.name)

    @property
    def quantized(self) -> bool:
        return any(operand.spec for operand in self.operands)

    @property
    def notes(self) -> str:
        """Return the reason, the remark, the accumulator, anomalies in the observed values, and operands larger than
        their format."""
        sums = f"sums in {self.accumulator}" if self.accumulator else None
        if sums and self.sums_sqnr is not None:
            sums += f": SQNR {self.sums_sqnr:.1f}"
        return "; ".join(filter(None, [self.reason, self.remark, sums, *map(_anomalies, self.operands)]))


def operator_reports(model: GraphModule, conversion: Conversion | None = None) -> Iterator[OperatorReport]:
    """Yield every operator that can be quantized and every other matmul-like operator, in execution order.

    Those of a subgraph follow those around it. Operators that the `conversion` of a prepared model removes are left
    out.
    """
    counter = ByteCounter()
    captured = captured_operands(model)
    for path, inner in named_graph_modules(model):
        constants = constants_of(inner)
        quantizable = set(quantizable_operators(inner.graph))
        for node in inner.graph.nodes:
            if conversion is not None and not conversion.computes(node):
                continue
            if node in quantizable:
                name = operator_name(called(node))
                inputs = _operands(node, constants)
            elif is_matmul_like(called(node)):
                name = operator_path(called(node))
                inputs = _float_inputs(node, constants)
            else:
                continue
            operands = [_operand_report(*operand, constants, captured, counter) for operand in inputs]
            yield OperatorReport(
                name=f"{path}.{node.name}" if path else node.name,
                module=module_name(node),
                operator=name,
                operands=tuple(operands),
                reason=_reason(node, node in quantizable, path, any(operand.spec for operand in operands)),
                remark=node.meta.get(REMARK_KEY),
                source=source_line(node),
                **accumulator_of(node),
            )


def _operands(node: Node, constants: set[Node]) -> list[tuple[str, Node]]:
    """Return (role, argument) of the operands of a quantizable operator."""
    operands = []
    for operand in operands_of(node):
        argument = operand_node(node, operand)
        if argument:
            operands.append((role_of(operand, argument, constants), argument))
    return operands


def _float_inputs(node: Node, constants: set[Node]) -> list[tuple[str, Node]]:
    """Return the same for another operator: its floating-point tensors."""
    inputs = []
    for n in node.all_input_nodes:
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            inputs.append(("weight" if n in constants else "activation", n))
    return inputs


def _reason(node: Node, quantizable: bool, path: str, quantized: bool) -> str | None:
    if not quantizable:
        return "pt2mx cannot quantize this operator"
    if quantized or REASON_KEY in node.meta:
        return node.meta.get(REASON_KEY)
    return "the quantizer did not select it" + (f", in the subgraph {path}" if path else "")


def _operand_report(
    role: str, argument: Node, constants: set[Node], captured: CapturedOperands, counter: ByteCounter
) -> OperandReport:
    source, spec, seen = _quantized(argument, constants, captured)
    value = argument.meta.get("val", source.meta.get("val"))
    counted = Counted(0, 0, 0)
    storage = None
    matmuls: dict[str, None] = {}
    if isinstance(value, torch.Tensor):
        in_every_call = argument.target is ops.dequantize_mx and source.target is getitem
        packed = None if in_every_call else spec
        sources = _sources(argument, source, constants, captured)
        counted = counter.add(value, packed, sources)
        if packed:
            storage = storage_note(value.shape, packed) if sources else None
            for one in sources:
                matmuls |= dict.fromkeys(one.matmuls)
    return OperandReport(
        role,
        None if spec is None else str(spec),
        seen.get(STATISTICS_KEY),
        seen.get(CANDIDATES_KEY, {}),
        *counted,
        storage,
        _static_scale(argument, captured),
        tuple(matmuls),
    )


def _static_scale(argument: Node, captured: CapturedOperands) -> float | None:
    """Return the tensor scale that calibration found for an operand, if it did."""
    if argument.op == "call_module":
        observer = observer_of(argument)
        static = None if observer is None else observer.static_scale
        return float(static.value(argument.name)) if static is not None and static.is_known else None
    quantize = quantize_of(argument)
    scale = None if quantize is None else Quantize.expect(quantize).tensor_scale
    around = captured.get(scale) if scale is not None else None
    outside = around[0] if around else scale
    if not isinstance(outside, Node) or outside.op != "get_attr":
        return None
    return float(tensor_of(model_of(outside.graph), outside))


def _sources(argument: Node, source: Node, constants: set[Node], captured: CapturedOperands) -> list[Source]:
    """Return the sources of an operand; none for a computed one."""
    if argument.target is ops.dequantize_mx and source in constants:
        sources = sources_of_codes(argument, captured)
        if sources:
            return sources
    return sources_of(source, captured) if is_constant(source, constants) else []


def _quantized(
    argument: Node, constants: set[Node], captured: CapturedOperands
) -> tuple[Node, MXSpec | None, Mapping[str, Any]]:
    """Return the tensor behind an operand, its spec (None: high precision), and a meta with its statistics.

    A constant without calibration gets the noise of its format.
    """
    if argument.op == "call_module":
        source = node_arg(argument)
        observer = observer_of(argument)
        if observer is None:
            return source, None, {}  # another quantizer's observer
        constant = is_constant(source, constants)
        seen = weight_statistics(observer, argument, captured) if constant else observer.statistics_meta()
        return source, observer.spec, seen
    if argument.target is ops.dequantize_mx:
        return node_arg(argument), spec_of_dequantize(argument), argument.meta
    if (fake := FakeQuantize.of(argument)) is not None:
        return fake.x, fake.spec, argument.meta
    return argument, None, {}


def _anomalies(operand: OperandReport) -> str:
    seen = operand.statistics
    texts = []
    if seen and seen.nonfinite:
        texts.append(f"{seen.nonfinite:,} of {seen.values:,} values are Inf or NaN")
    if seen and seen.empty:
        texts.append(f"{seen.empty:,} of {seen.tensors:,} tensors are empty")
    if operand.storage:
        texts.append(operand.storage)
    if operand.matmuls:
        texts.append(f"{', '.join(operand.matmuls)} computes it once, at conversion")
    return f"{operand.role}: {', '.join(texts)}" if texts else ""


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of a report from a JSON file. A ratio that was not finite is NaN."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise MXError(f"cannot read {str(path)!r} as a report in JSON: {error}") from None
    try:
        operators = tuple(map(_operator, content["operators"]))
        totals = {name: index(content[name]) for name in ("values", "bytes_before", "bytes_after")}
        return {"operators": operators, **totals}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MXError(
            f"{str(path)!r} is no report that QuantizationReport.to_json wrote: {type(error).__name__}: {error}"
        ) from None


def _operator(content: dict[str, Any]) -> OperatorReport:
    return OperatorReport(**{**content, "operands": tuple(map(_operand, content["operands"]))})


def _operand(content: dict[str, Any]) -> OperandReport:
    seen = content["statistics"] and _statistics(content["statistics"])
    candidates = {name: _statistics(statistics) for name, statistics in content["candidates"].items()}
    matmuls = tuple(content.get("matmuls", ()))
    return OperandReport(**{**content, "statistics": seen, "candidates": candidates, "matmuls": matmuls})


def _statistics(content: dict[str, Any]) -> QuantizationStatistics:
    fields: dict[str, Any] = {name: math.nan if value is None else value for name, value in content.items()}
    fields["exponents"] = {int(exponent): blocks for exponent, blocks in content["exponents"].items()}
    return QuantizationStatistics(**fields)
