"""The report as a table of pandas, one row per operand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

from pt2mx.extras import import_extra
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport

if TYPE_CHECKING:
    import pandas

_OF_OPERATOR = ("operator", "name", "module", "source", "quantized", "notes")
_OF_STATISTICS = ("sqnr", "saturated", "flushed")
_OF_OPERAND = ("values", "bytes_before", "bytes_after", "tensor_scale")
COLUMNS = (*_OF_OPERATOR, "role", "format", *_OF_STATISTICS, *_OF_OPERAND)

_NONE = OperandReport("", None, None, {}, 0, 0, 0)


def dataframe(operators: Iterable[OperatorReport]) -> pandas.DataFrame:
    """Return one row per operand, and one for an operator without operands. A number that is not known is NaN."""
    rows = [_row(operator, operand) for operator in operators for operand in operator.operands or (_NONE,)]
    table = import_extra("pandas").DataFrame(rows, columns=list(COLUMNS))
    return table.astype(dict.fromkeys((*_OF_STATISTICS, "tensor_scale"), "float64"))


def _row(operator: OperatorReport, operand: OperandReport) -> tuple[object, ...]:
    of_operator = attrgetter(*_OF_OPERATOR)(operator)
    of_statistics = (getattr(operand.statistics, name, math.nan) for name in _OF_STATISTICS)
    return (*of_operator, operand.role, operand.spec, *of_statistics, *attrgetter(*_OF_OPERAND)(operand))
