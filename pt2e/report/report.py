"""`quantization_report`: what was quantized, with which spec, at what cost; what was not, and why."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from torch.fx import GraphModule

from pt2mx.analysis.tables import text_table
from pt2mx.errors import MXError
from pt2mx.pt2e.observer import MXObserver
from pt2mx.pt2e.output import write_text
from pt2mx.pt2e.report.html import page
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport, operator_reports


@dataclass(frozen=True)
class QuantizationReport:
    """The report of a prepared or converted model: every operator that can be quantized and every other matrix product,
    convolution, recurrent layer or attention, in the order of execution.

    Bytes are those of all parameters and buffers.
    """

    operators: tuple[OperatorReport, ...]
    values: int
    bytes_before: int
    bytes_after: int

    @property
    def effective_bits(self) -> float:
        """Bits of a value of all parameters and buffers, scales counted, on the average."""
        return 8 * self.bytes_after / self.values if self.values else 0.0

    @property
    def weight_bits(self) -> float:
        """Bits of a value of the quantized weights, scales counted, on the average: what `suggest_config` budgets."""
        weights = [w for o in self.operators for w in o.operands if w.role == "weight" and w.spec]
        values = sum(weight.values for weight in weights)
        return 8 * sum(weight.bytes_after for weight in weights) / values if values else 0.0

    def to_table(self, candidates: bool = False) -> str:
        """A table of text: one line an operator, and a line of totals.

        Args:
            candidates: instead, a line for each operand that an `MXFormatObserver` observed, with the SQNR in dB of
                each candidate.

        Raises:
            MXError: with `candidates`, where there was no such observer or no batch.
        """
        if candidates:
            return text_table(_candidate_rows(self.operators), left=4)
        header = ("module", "operator", "activation", "weight", "SQNR a", "SQNR w", "bytes", "after", "")
        rows = [header, *(_row(operator, self._observed) for operator in self.operators)]
        *columns, notes = zip(*rows, strict=True)
        lines = text_table(list(zip(*columns, strict=True)), left=4).splitlines()
        width = max(map(len, lines))
        lines = [f"{line:{width}}  {note}".rstrip() for line, note in zip(lines, notes, strict=True)]
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """The totals in a line."""
        quantized = sum(o.quantized for o in self.operators)
        no_sqnr = "; no SQNR: it holds no statistics of a calibration" if quantized and not self._observed else ""
        return (
            f"{quantized} of {len(self.operators)} operators quantized; parameters "
            f"{self.bytes_before:,} bytes -> {self.bytes_after:,} ({self.effective_bits:.2f} bits a value){no_sqnr}"
        )

    @property
    def _observed(self) -> bool:
        return any(operand.statistics for operator in self.operators for operand in operator.operands)

    def to_json(self, path: object = None) -> str:
        """The report as JSON, also written to `path` if one is given; null stands for a ratio that is not finite.

        Raises:
            MXError: where no file can be written at `path`.
        """
        bits = {"effective_bits": self.effective_bits, "weight_bits": self.weight_bits}
        return write_text(json.dumps(_finite({**bits, **asdict(self)}), indent=1, allow_nan=False), path)

    def to_html(self, path: object = None) -> str:
        """The report as one HTML page that needs nothing else, also written to `path` if one is given: the table, with
        the SQNR of every operand and candidate as bars and histograms of block exponents.

        Raises:
            MXError: where no file can be written at `path`.
        """
        return write_text(page(self), path)


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
    operators = tuple(operator_reports(model))
    observers = [m for m in model.modules() if isinstance(m, MXObserver)]
    statistics = {id(buffer) for observer in observers for buffer in observer.buffers()}
    tensors = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in statistics]
    held, values = sum(t.nbytes for t in tensors), sum(t.numel() for t in tensors)
    operands = [o for operator in operators for o in operator.operands]
    before, after = sum(o.bytes_before for o in operands), sum(o.bytes_after for o in operands)
    if observers:  # the model still holds the float weights
        return QuantizationReport(operators, values, held, held - before + after)
    packed = [o for o in operands if o.spec]
    values += sum(o.values for o in packed) - sum(o.bytes_after for o in packed)  # codes and scales are a byte each
    return QuantizationReport(operators, values, held - after + before, held)


def _row(operator: OperatorReport, observed: bool) -> tuple[str, ...]:
    """The cells of an operator; `observed`: whether there are statistics of any."""
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
        "; ".join(filter(None, [operator.notes, *(_unseen(operator) if observed else ())])),
    )


def _unseen(operator: OperatorReport) -> list[str]:
    roles = dict.fromkeys(o.role for o in operator.operands if o.spec and not o.statistics)
    return [f"{role}: no SQNR, calibration did not reach it" for role in roles]


def _candidate_rows(operators: tuple[OperatorReport, ...]) -> list[tuple[str, ...]]:
    found = [(operator, operand) for operator in operators for operand in operator.operands if operand.candidates]
    if not found:
        raise MXError(
            "no candidates were observed: prepare with observer=MXFormatObserver.with_args(candidates=...) in the "
            "config, and run batches through the prepared model"
        )
    names = list(dict.fromkeys(name for _, operand in found for name in operand.candidates))

    def row(operator: OperatorReport, operand: OperandReport) -> tuple[str, ...]:
        sqnr = (operand.candidates[n].sqnr if n in operand.candidates else None for n in names)
        place = (operator.module, operator.operator, operand.role, operand.spec or "-")
        return *place, *("" if db is None else f"{db:.1f}" for db in sqnr)

    return [("module", "operator", "operand", "quantized to", *names), *(row(*pair) for pair in found)]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
