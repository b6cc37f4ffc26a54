"""Format tables in plain text."""

from collections.abc import Sequence
from typing import TypeVar

from pt2mx.errors import MXError

Row = TypeVar("Row")


def text_table(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Return a table with aligned columns.

    Args:
        rows: the cells; the first row is the header.
        left: the number of first columns to align on the left; the others contain numbers. By default all.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    align = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    lines = ("  ".join(f(cell, w) for f, cell, w in zip(align, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def worst_rows(rows: Sequence[Row], worst: int | None) -> Sequence[Row]:
    """Return the first rows of a table that is sorted by error, the worst first.

    Args:
        rows: the rows of the table.
        worst: the number of rows; None for all.

    Raises:
        MXError: if `worst` is not a number of rows.
    """
    if worst is not None and (isinstance(worst, bool) or not isinstance(worst, int) or worst < 0):
        raise MXError(f"worst={worst!r} must be a number of rows, or None for all")
    return rows[:worst]
