"""The recommended one of the compared recipes, and the sentence that says why."""

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


def recommended(comparison: RecipeComparison) -> RecipeRow | None:
    """Return the smallest recipe that is good enough, or the best one where none is; None where no recipe works.

    Good enough is a cosine of .99, a divergence of .05 nats or a SQNR of 20 dB, and in a user's metric a loss of 1 % of
    the float model's quality. A quality counts with the unfavourable end of its 95 % interval.
    """
    rows = [row for row in comparison.front() if row.name != FLOAT]
    return next((row for row in rows if _is_enough(row, comparison)), rows[-1] if rows else None)


def advice(comparison: RecipeComparison) -> str:
    """Return which recipe to take and why: the one that is `recommended`."""
    row, enough = recommended(comparison), _enough(comparison)
    if row is None:
        works = any(row.name != FLOAT and math.isfinite(row.quality) for row in comparison.rows)
        reason = "the float model is smaller and better" if works else "no recipe works"
        return f"Nothing to recommend: {reason}."
    if enough is None:
        return f"Choose one of the marked recipes by the {comparison.metric} that you need."
    name, _, unit = comparison.metric.partition(", ")
    bound = f"{name} of at {'least' if comparison.larger_is_better else 'most'} {quality_text(enough)} {unit}".strip()
    if not _is_enough(row, comparison):
        return (
            f"No recipe has a {bound}: {row.name} is the closest, with {_measured(row)}. Optimize its "
            "weights, or keep its costliest modules in float."
        )
    size, whole = "", _float_row(comparison)
    if whole and whole.bytes and row.bytes:
        ratio = ratio_text(whole.bytes / row.bytes, "smaller than", "larger than", "about as large as")
        size = f", {ratio} float"
    return (
        f"Recommended: {row.name}, the smallest recipe with a {bound} ({_measured(row)}){size}"
        f"{_speed(comparison, row)}.{_doubts(comparison, row)}"
    )


def _speed(comparison: RecipeComparison, row: RecipeRow) -> str:
    """Return how fast a recipe is on this machine, where it was measured."""
    verdict = "" if comparison.speed is None else comparison.speed.verdict(row.name)
    return f"; here it is {verdict}" if verdict else ""


def _float_row(comparison: RecipeComparison) -> RecipeRow | None:
    return next((row for row in comparison.rows if row.name == FLOAT), None)


def _enough(comparison: RecipeComparison) -> float | None:
    """Return the quality that is good enough; None in a user's metric without the float model's quality."""
    whole = _float_row(comparison)
    if comparison.metric in _ENOUGH or whole is None or whole.quality == 0:
        return _ENOUGH.get(comparison.metric)
    return whole.quality - _sign(comparison) * _LOSS * abs(whole.quality)


def _is_enough(row: RecipeRow, comparison: RecipeComparison) -> bool:
    enough, sign = _enough(comparison), _sign(comparison)
    return enough is not None and sign * row.quality - _error(row) >= sign * enough


def _sign(comparison: RecipeComparison) -> int:
    return 1 if comparison.larger_is_better else -1


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
