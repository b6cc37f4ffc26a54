"""The data of a page: what its scripts draw, as plain lists and dicts.

Numbers that JSON has no words for are "Infinity", "-Infinity" and "NaN", which `Number` in JavaScript reads.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.pt2e.report.page.context import PageContext
from pt2mx.pt2e.report.page.graphs import DrawnGraph, places
from pt2mx.pt2e.report.page.outliers import outliers
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport
from pt2mx.pt2e.sensitivity.result import Sensitivity

if TYPE_CHECKING:
    from pt2mx.pt2e.report.report import QuantizationReport

_DIGITS = 6


def contents(report: QuantizationReport, context: PageContext) -> dict[str, Any]:
    """All that the page of a report shows."""
    graphs = {
        name: DrawnGraph.of(model, name)
        for name, model in (("before", context.before), ("after", context.after))
        if model is not None
    }
    where = places((o.name for o in report.operators), graphs.get("before"), graphs.get("after"))
    low = outliers(operand for operator in report.operators for operand in operator.operands)
    operators = [
        {**_operator(operator, low), "places": place} for operator, place in zip(report.operators, where, strict=True)
    ]
    found = {
        "model": context.model,
        "recipe": {"name": context.recipe_name, "text": context.recipe_text()},
        "totals": {
            "before": report.bytes_before,
            "after": report.bytes_after,
            "bits": report.effective_bits,
            "weightBits": report.weight_bits,
            "quantized": sum(operator.quantized for operator in report.operators),
        },
        "quality": list(context.known_quality().items()),
        "formats": _bytes_by_format(report),
        "operators": operators,
        "comparison": context.comparison and asdict(context.comparison),
        "sensitivity": _sensitivity(context.sensitivity),
        "graphs": {name: graph.rows for name, graph in graphs.items()},
    }
    return plain(found)


def _operator(operator: OperatorReport, low: dict[int, float]) -> dict[str, Any]:
    return {
        "name": operator.name,
        "module": operator.module,
        "operator": operator.operator,
        "quantized": operator.quantized,
        "notes": operator.notes,
        "operands": [_operand(operand, low) for operand in operator.operands],
    }


def _operand(operand: OperandReport, low: dict[int, float]) -> dict[str, Any]:
    return {
        "role": operand.role,
        "spec": operand.spec,
        "before": operand.bytes_before,
        "after": operand.bytes_after,
        "below": low.get(id(operand)),
        "seen": operand.statistics and _seen(operand.statistics),
        "candidates": [[name, *_noise(seen)] for name, seen in operand.candidates.items()],
    }


def _seen(seen: QuantizationStatistics) -> dict[str, Any]:
    """The findings of calibration, with the exponents in flat pairs of exponent and blocks."""
    pairs = [number for pair in sorted(seen.exponents.items()) for number in pair]
    shown = {name: getattr(seen, name) for name in ("tensors", "values", "nonfinite")}
    return {**shown, "noise": _noise(seen), "exponents": pairs, "nanBlocks": seen.nan_blocks}


def _noise(seen: QuantizationStatistics) -> list[float]:
    return [seen.sqnr, seen.saturated, seen.flushed]


def _bytes_by_format(report: QuantizationReport) -> list[tuple[str | None, int]]:
    """The bytes of each format, the largest share first, what is in high precision (None) last."""
    sizes: Counter[str] = Counter()
    for operator in report.operators:
        for operand in operator.operands:
            if operand.spec:
                sizes[operand.spec] += operand.bytes_after
    shares: list[tuple[str | None, int]] = [(name, size) for name, size in sizes.most_common() if size]
    rest = report.bytes_after - sum(size for _, size in shares)
    return [*shares, (None, rest)] if rest > 0 else shares


def _sensitivity(found: Sensitivity | None) -> dict[str, Any] | None:
    """The rows by module, and the candidate that costs the most over all modules, which the table shows."""
    if found is None:
        return None
    rows, costs = defaultdict(list), defaultdict[str, float](float)
    for row in found.rows:
        rows[row.module].append([row.candidate, row.operands, row.alone, row.left, row.estimate])
        costs[row.candidate] += 0.0 if math.isnan(row.cost) else row.cost
    return {"metric": found.metric, "modules": rows, "worst": max(costs, key=lambda name: costs[name], default=None)}


def plain(value: Any) -> Any:
    """The same with numbers that JSON can hold, to six digits."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return float(f"{value:.{_DIGITS}g}")
    return value
