"""Operators of a report as `QuantizationReport.to_json` wrote them."""

from __future__ import annotations

import json
import math
import os
from operator import index
from pathlib import Path
from typing import Any

from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.errors import MXError
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport

#: fields of the report itself, beside its operators
_TOTALS = ("values", "bytes_before", "bytes_after")


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a report in a JSON file. A ratio that was not finite is NaN.

    Raises:
        MXError: where there is no such file, or it holds something else.
    """
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise MXError(f"cannot read {str(path)!r} as a report in JSON: {error}") from None
    try:
        return {"operators": tuple(map(_operator, held["operators"])), **{name: index(held[name]) for name in _TOTALS}}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MXError(
            f"{str(path)!r} is no report that QuantizationReport.to_json wrote: {type(error).__name__}: {error}"
        ) from None


def _operator(held: dict[str, Any]) -> OperatorReport:
    return OperatorReport(**{**held, "operands": tuple(map(_operand, held["operands"]))})


def _operand(held: dict[str, Any]) -> OperandReport:
    seen = held["statistics"]
    candidates = {name: _statistics(found) for name, found in held["candidates"].items()}
    return OperandReport(**{**held, "statistics": seen and _statistics(seen), "candidates": candidates})


def _statistics(held: dict[str, Any]) -> QuantizationStatistics:
    exponents = {int(exponent): blocks for exponent, blocks in held["exponents"].items()}
    ratios = {name: math.nan if held[name] is None else held[name] for name in ("sqnr", "saturated", "flushed")}
    return QuantizationStatistics(**{**held, "exponents": exponents, **ratios})
