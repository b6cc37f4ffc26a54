"""Operands whose noise stands out among those of the same role and format."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from pt2mx.pt2e.report.rows import OperandReport

#: an outlier is so many deviations, and so many dB, below the median; fewer operands have no median to speak of
_DEVIATIONS, _LEAST_DB, _LEAST_COUNT = 3.0, 3.0, 5
#: the standard deviation of a normal distribution whose median absolute deviation is 1
_NORMAL = 1.4826


def outliers(operands: Iterable[OperandReport]) -> dict[int, float]:
    """Operands of a low SQNR: identity -> how many dB below the median of its role and format (infinite where the
    format lost it all)."""
    groups: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    found = {}
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
                found[key] = below
    return found
