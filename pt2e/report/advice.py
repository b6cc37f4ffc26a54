"""A sentence that recommends one of the compared recipes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pt2mx.analysis.metrics import METRICS
from pt2mx.analysis.samples import LEAST_SAMPLES
from pt2mx.analysis.tables import ratio_text

if TYPE_CHECKING:
    from pt2mx.pt2e.report.results import RecipeComparison, RecipeRow

#: the name of the float model's row
FLOAT = "float"
_ENOUGH = {metric.quality.name: metric.quality.enough for metric in METRICS.values()}
#: the share of the float model's quality that a recipe may lose in a user's metric
_LOSS = 0.01


def quality_text(quality: float) -> str:
    """Return a quality with three digits of its distance from 1, so that .99997 and .99998 differ."""
    if 0.9 < quality < 1:
        digits = max(4, 2 - math.floor(math.log10(1 - quality)))
        return f"{quality:.{digits}f}"
    return f"{quality:.5g}"


def advice(comparison: RecipeComparison) -> str:
    """Return which recipe to take and why: the smallest one that is good enough.

    Good enough is a cosine of .99, a divergence of .05 nats or a SQNR of 20 dB, and in a user's metric a loss of 1 % of
    the float model's quality. A quality counts with the unfavourable end of its 95 % interval.
    """
    whole = next((row for row in comparison.rows if row.name == FLOAT), None)
    rows = [row for row in comparison.front() if row.name != FLOAT]
    if not rows:
        works = any(row.name != FLOAT and math.isfinite(row.quality) for row in comparison.rows)
        reason = "the float model is smaller and better" if works else "no recipe works"
        return f"Nothing to recommend: {reason}."
    sign = 1 if comparison.larger_is_better else -1
    enough = _ENOUGH.get(comparison.metric)
    if enough is None:
        if whole is None or whole.quality == 0:
            return f"Choose one of the marked recipes by the {comparison.metric} that you need."
        enough = whole.quality - sign * _LOSS * abs(whole.quality)
    name, _, unit = comparison.metric.partition(", ")
    bound = f"{name} of at {'least' if sign > 0 else 'most'} {quality_text(enough)} {unit}".strip()
    chosen = next((row for row in rows if sign * row.quality - _error(row) >= sign * enough), None)
    if chosen is None:
        return (
            f"No recipe has a {bound}: {rows[-1].name} is the closest, with {_measured(rows[-1])}. Optimize its "
            "weights, or keep its costliest modules in float."
        )
    size = ""
    if whole and whole.bytes and chosen.bytes:
        ratio = ratio_text(whole.bytes / chosen.bytes, "smaller than", "larger than", "about as large as")
        size = f", {ratio} float"
    return (
        f"Recommended: {chosen.name}, the smallest recipe with a {bound} ({_measured(chosen)}){size}."
        f"{_doubts(comparison, chosen)}"
    )


def _measured(row: RecipeRow) -> str:
    """Return the quality with half of its interval."""
    error = f" ± {row.error:.2g}" if _error(row) else ""
    return f"{quality_text(row.quality)}{error}"


def _error(row: RecipeRow) -> float:
    return 0.0 if math.isnan(row.error) else row.error


def _doubts(comparison: RecipeComparison, chosen: RecipeRow) -> str:
    """Return what the samples do not show."""
    doubts = ""
    count = len(chosen.samples)
    tied = [row.name for row in comparison.rows if row.tied == chosen.name or row.name == chosen.tied]
    if tied:
        doubts += f" There are too few samples to rank it against {', '.join(tied)}."
    if 0 < count < LEAST_SAMPLES:
        doubts += f" Measure on more than {count} sample{'s' * (count > 1)}: {LEAST_SAMPLES} or more show the error."
    return doubts
