"""`quantization_report`: what was quantized, with which spec, at what cost; what was not, and why."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.constants import constant_nodes
from pt2mx.fx.module_stack import module_name
from pt2mx.fx.quantize_dequantize import spec_of_dequantize
from pt2mx.kernels.packing import packed_length
from pt2mx.pt2e.annotate import REASON_KEY
from pt2mx.pt2e.observer import STATISTICS_KEY, MXObserver
from pt2mx.pt2e.operators import operand_node, operands_of, operator_name, quantizable_operators, role_of
from pt2mx.spec import MXSpec
from pt2mx.statistics import QuantizationStatistics


@dataclass(frozen=True)
class OperandReport:
    """One operand: the spec it is quantized to (None: high precision), what calibration saw, and the values and bytes
    of a constant one (0 for a computed one, and for one that an earlier operator shares)."""

    role: str
    spec: str | None
    statistics: QuantizationStatistics | None
    values: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class OperatorReport:
    """One operator, and why it or an operand was left in high precision, if so."""

    name: str
    module: str
    operator: str
    operands: tuple[OperandReport, ...]
    reason: str | None

    @property
    def quantized(self) -> bool:
        return any(operand.spec for operand in self.operands)


@dataclass(frozen=True)
class QuantizationReport:
    """The report of a prepared or converted model: every operator that can be quantized, in the order of execution.

    Bytes are those of all parameters and buffers; `effective_bits` are those of a value of them, on the average.
    """

    operators: tuple[OperatorReport, ...]
    values: int
    bytes_before: int
    bytes_after: int

    @property
    def effective_bits(self) -> float:
        return 8 * self.bytes_after / self.values if self.values else 0.0

    def to_table(self) -> str:
        """A table of text, one line an operator, and a line of totals."""
        rows = [("module", "operator", "activation", "weight", "SQNR a", "SQNR w", "bytes", "after", "")]
        rows += [_row(operator) for operator in self.operators]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        align = [str.ljust] * 4 + [str.rjust] * 4 + [str.ljust]
        lines = ["  ".join(f(cell, w) for f, cell, w in zip(align, row, widths, strict=True)) for row in rows]
        total = (
            f"{sum(o.quantized for o in self.operators)} of {len(self.operators)} operators quantized; parameters "
            f"{self.bytes_before:,} bytes -> {self.bytes_after:,} ({self.effective_bits:.2f} bits a value)"
        )
        return "\n".join([*(line.rstrip() for line in lines), total])

    def to_json(self, path: object = None) -> str:
        """The report as JSON, also written to `path` if one is given; null stands for a ratio that is not finite."""
        text = json.dumps(_finite({"effective_bits": self.effective_bits, **asdict(self)}), indent=1, allow_nan=False)
        if path is not None:
            Path(path).write_text(text)
        return text


def quantization_report(model: GraphModule) -> QuantizationReport:
    """The report of a model that `prepare_pt2e`, `prepare_qat_pt2e` or `convert_pt2e` returned.

    Raises:
        MXError: for another object.
    """
    if not isinstance(model, GraphModule):
        raise MXError(
            f"expected a prepared or converted graph module, not {type(model).__name__}: "
            "pass what prepare_pt2e or convert_pt2e returned"
        )
    constants, counted = constant_nodes(model.graph), set()
    operators = tuple(_operator_report(model, node, constants, counted) for node in quantizable_operators(model.graph))
    observers = [m for m in model.modules() if isinstance(m, MXObserver)]
    statistics = {id(buffer) for observer in observers for buffer in observer.buffers()}
    tensors = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in statistics]
    held, values = sum(t.nbytes for t in tensors), sum(t.numel() for t in tensors)
    quantized = [o for operator in operators for o in operator.operands if o.spec]
    before, after = sum(o.bytes_before for o in quantized), sum(o.bytes_after for o in quantized)
    if observers:  # the model still holds the float weights
        return QuantizationReport(operators, values, held, held - before + after)
    values += sum(o.values for o in quantized) - after  # codes and scales are a byte each, and no values
    return QuantizationReport(operators, values, held - after + before, held)


def _operator_report(model: GraphModule, node: Node, constants: set[Node], counted: set[Node]) -> OperatorReport:
    operands = tuple(
        _operand_report(model, role_of(operand, argument, constants), argument, constants, counted)
        for operand in operands_of(node)
        if (argument := operand_node(node, operand)) is not None
    )
    return OperatorReport(node.name, module_name(node), operator_name(node.target), operands, node.meta.get(REASON_KEY))


def _operand_report(
    model: GraphModule, role: str, argument: Node, constants: set[Node], counted: set[Node]
) -> OperandReport:
    source, spec, statistics = argument, None, None
    if argument.op == "call_module":
        observer = model.get_submodule(argument.target)
        source = argument.args[0]
        if isinstance(observer, MXObserver):  # another quantizer may have put its own there
            spec, statistics = observer.spec, observer.statistics
    elif argument.target is ops.dequantize_mx:
        source, spec = argument.args[0], spec_of_dequantize(argument)
        statistics = argument.meta.get(STATISTICS_KEY)
    value, values, before, after = argument.meta.get("val", source.meta.get("val")), 0, 0, 0
    if source in constants and source not in counted and isinstance(value, torch.Tensor):
        counted.add(source)
        values = value.numel()
        before = after = values * value.element_size()
        if spec is not None:
            after = _packed_bytes(value.shape, spec)
    return OperandReport(role, None if spec is None else str(spec), statistics, values, before, after)


def _packed_bytes(shape: torch.Size, spec: MXSpec) -> int:
    length = shape[spec.axis]
    rows = math.prod(shape) // length if length else 0
    return rows * (packed_length(length, spec.element.bits) + -(-length // spec.block_size))


def _row(operator: OperatorReport) -> tuple[str, ...]:
    by_role = {role: [o for o in operator.operands if o.role == role] for role in ("activation", "weight")}
    specs = {r: "/".join(dict.fromkeys(o.spec or "-" for o in found)) for r, found in by_role.items()}
    sqnr = {r: [o.statistics.sqnr for o in found if o.statistics] for r, found in by_role.items()}
    before, after = (sum(getattr(o, f"bytes_{w}") for o in operator.operands) for w in ("before", "after"))
    return (
        operator.module,
        operator.operator,
        *(specs[role] for role in by_role),
        *(f"{min(sqnr[role]):.1f}" if sqnr[role] else "" for role in by_role),
        *(f"{n:,}" if n else "" for n in (before, after)),
        operator.reason or "",
    )


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
