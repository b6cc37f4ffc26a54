"""Tables in plain text."""

from collections.abc import Sequence
from typing import TypeVar

from pt2mx.errors import MXError

Row = TypeVar("Row")


def text_table(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Return a table with aligned columns.

    Args:
        rows: the cells, the first row being the header.
        left: how many of the first columns are aligned on the left, the others being numbers; by default all.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    align = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    lines = ("  ".join(f(cell, w) for f, cell, w in zip(align, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def worst_rows(rows: Sequence[Row], worst: int | None) -> Sequence[Row]:
    """Return the first rows, where the worst stand first.

    Args:
        rows: of a table.
        worst: how many; None for all.

    Raises:
        MXError: for what is no number of rows.
    """
    if worst is not None and (isinstance(worst, bool) or not isinstance(worst, int) or worst < 0):
        raise MXError(f"worst={worst!r} must be a number of rows, or None for all")
    return rows[:worst]
