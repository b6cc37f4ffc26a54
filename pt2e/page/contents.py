"""The context of a page, and the data that its scripts draw, as plain lists and dicts.

JSON has no Inf and NaN: they are "Infinity", "-Infinity" and "NaN", which `Number` in JavaScript reads.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from types import NoneType
from typing import TYPE_CHECKING, Any, SupportsFloat

from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.analysis.metrics import METRICS
from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.errors import MXError
from pt2mx.pt2e.page.graphs import DrawnGraph, node_positions
from pt2mx.pt2e.quantizer import recipe as recipes
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.results import RecipeComparison, Sensitivity
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport

if TYPE_CHECKING:
    from pt2mx.pt2e.report.report import QuantizationReport

_KINDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "recipe": (str, os.PathLike, MXQuantizer),
    "quality": (Mapping,),
    "comparison": (RecipeComparison, NoneType),
    "sensitivity": (Sensitivity, NoneType),
}


@dataclass(frozen=True)
class PageContext:
    """The arguments of `QuantizationReport.to_html`, which documents them."""

    model: str = ""
    recipe: str | os.PathLike[str] | MXQuantizer = ""
    quality: Mapping[str, SupportsFloat] = field(default_factory=dict)
    comparison: RecipeComparison | None = None
    sensitivity: Sensitivity | None = None
    before: GraphModule | ExportedProgram | None = None
    after: GraphModule | ExportedProgram | None = None

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                allowed = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
                raise MXError(f"{name} must be {allowed}, not of type {type(value).__name__}")

    @property
    def recipe_name(self) -> str:
        """Return the name of the recipe, if it has one."""
        return "" if isinstance(self.recipe, MXQuantizer) else os.fspath(self.recipe)

    def recipe_text(self) -> str:
        """Return the YAML of the recipe; "" without a recipe."""
        if isinstance(self.recipe, MXQuantizer):
            return self.recipe.to_recipe()
        return recipes.text(self.recipe) if self.recipe_name else ""

    def known_quality(self) -> dict[str, float]:
        """Return the passed quality, else the recipe's quality in the comparison."""
        if self.quality or self.comparison is None:
            return {name: _number(name, value) for name, value in self.quality.items()}
        for row in self.comparison.rows:
            if row.name == self.recipe_name:
                return {self.comparison.metric: row.quality}
        return {}


def _number(name: str, value: SupportsFloat) -> float:
    """Return a number of any library as a float."""
    try:
        if isinstance(value, SupportsFloat):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several values
        pass
    raise MXError(f"quality[{name!r}] must be a number, not {value!r}")


#: an outlier is this many deviations, and this many dB, below the median; the median needs this many operands
_DEVIATIONS, _LEAST_DB, _LEAST_COUNT = 3.0, 3.0, 5
#: the standard deviation of a normal distribution whose median absolute deviation is 1
_NORMAL = 1.4826


def outliers(operands: Iterable[OperandReport]) -> dict[int, float]:
    """Return operands with a low SQNR: identity -> dB below the median of its role and format.

    It is infinite where the format lost all signal.
    """
    groups: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    below_median = {}
    for operand in operands:
        if operand.spec and operand.statistics and not math.isnan(operand.statistics.sqnr):
            groups[operand.role, operand.spec].append((id(operand), operand.statistics.sqnr))
    for group in groups.values():
        finite = [sqnr for _, sqnr in group if math.isfinite(sqnr)]
        bound = math.inf
        if len(finite) >= _LEAST_COUNT:
            spread = _NORMAL * median(abs(sqnr - median(finite)) for sqnr in finite)
            bound = max(_LEAST_DB, _DEVIATIONS * spread)
        for key, sqnr in group:
            below = median(finite) - sqnr if finite else math.inf
            if sqnr == -math.inf or (math.isfinite(sqnr) and below > bound):
                below_median[key] = below
    return below_median


_DIGITS = 6


def contents(report: QuantizationReport, context: PageContext) -> dict[str, Any]:
    """Return all data that the page of a report shows."""
    graphs: dict[str, DrawnGraph] = {}
    for name, model in (("before", context.before), ("after", context.after)):
        if model is not None:
            graphs[name] = DrawnGraph.of(model, name)
    low = outliers(report.operands)
    operators = [_operator(operator, low) for operator in report.operators]
    names = [operator.name for operator in report.operators]
    positions = node_positions(names, graphs.get("before"), graphs.get("after"))
    for content, places in zip(operators, positions, strict=True):
        content["places"] = places
    data = {
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
        "comparison": context.comparison and _comparison(context.comparison),
        "sensitivity": _sensitivity(context.sensitivity),
        "graphs": {name: graph.rows for name, graph in graphs.items()},
    }
    return plain(data)


def _operator(operator: OperatorReport, low: dict[int, float]) -> dict[str, Any]:
    names = ("name", "module", "source", "operator", "quantized", "notes")
    shown = {name: getattr(operator, name) for name in names}
    return {**shown, "operands": [_operand(operand, low) for operand in operator.operands]}


def _operand(operand: OperandReport, low: dict[int, float]) -> dict[str, Any]:
    return {
        "role": operand.role,
        "spec": operand.spec,
        "before": operand.bytes_before,
        "after": operand.bytes_after,
        "tensorScale": operand.tensor_scale,
        "below": low.get(id(operand)),
        "seen": operand.statistics and _seen(operand.statistics),
        "candidates": [[name, *_noise(seen)] for name, seen in operand.candidates.items()],
    }


def _seen(seen: QuantizationStatistics) -> dict[str, Any]:
    """Return calibration statistics, with the exponents as a flat list of exponent, blocks."""
    pairs = list(itertools.chain.from_iterable(sorted(seen.exponents.items())))
    shown = {name: getattr(seen, name) for name in ("tensors", "values", "nonfinite")}
    return {**shown, "noise": _noise(seen), "exponents": pairs, "nanBlocks": seen.nan_blocks}


def _noise(seen: QuantizationStatistics) -> list[float]:
    return [seen.sqnr, seen.saturated, seen.flushed]


def _bytes_by_format(report: QuantizationReport) -> list[tuple[str | None, int]]:
    """Return the bytes of each format, the largest first, and those in high precision (None) last."""
    sizes: Counter[str] = Counter()
    for operand in report.operands:
        if operand.spec and operand.bytes_after:
            sizes[operand.spec] += operand.bytes_after
    high_precision = report.bytes_after - sum(sizes.values())
    shares: list[tuple[str | None, int]] = [*sizes.most_common()]
    return [*shares, (None, high_precision)] if high_precision > 0 else shares


def _comparison(result: RecipeComparison) -> dict[str, Any]:
    """Return the rows with the y of their points: the loss, for a logarithmic scale, or decibels.

    The loss is rounded on its own: six digits of a cosine of .99997 would leave one of its distance from 1.
    """
    scale, rows = "log", [row.to_dict() for row in result.rows]
    if result.metric == METRICS["cosine"].quality.name:
        scale = "from one"
    elif result.larger_is_better or any(row.quality < 0 for row in result.rows):
        scale = "linear"
    for row in rows:
        row["y"] = 1 - row["quality"] if scale == "from one" else row["quality"]
    names = {"metric": result.metric, "larger_is_better": result.larger_is_better}
    speed = result.speed and result.speed.to_dict()
    return {**names, "scale": scale, "advice": result.advice(), "rows": rows, "speed": speed}


def _sensitivity(result: Sensitivity | None) -> dict[str, Any] | None:
    """Return the rows by module, and the candidate with the largest total cost, which the table shows."""
    if result is None:
        return None
    rows, costs = defaultdict(list), defaultdict[str, float](float)
    for row in result.rows:
        rows[row.module].append([row.candidate, row.operands, row.alone, row.left, row.estimate])
        costs[row.candidate] += 0.0 if math.isnan(row.cost) else row.cost
    return {"metric": result.metric, "modules": rows, "worst": max(costs, key=lambda name: costs[name], default=None)}


def plain(value: Any) -> Any:
    """Return a value with numbers that JSON can hold, to six digits."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            if math.isnan(value):
                return "NaN"
            return "Infinity" if value > 0 else "-Infinity"
        return float(f"{value:.{_DIGITS}g}")
    return value
