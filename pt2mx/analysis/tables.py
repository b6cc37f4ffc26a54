"""Format tables and ratios in plain text."""

from collections.abc import Sequence
from typing import TypeVar

from pt2mx.errors import MXError

Row = TypeVar("Row")
#: ratios below this one are called equal: with one digit they would read 1.0
_EQUAL = 1.05


def text_table(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Return a table with aligned columns.

    Args:
        rows: the cells; the first row is the header.
        left: the number of first columns to align on the left; the others contain numbers. By default all.
    """
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        align = str.ljust if left is None or i < left else str.rjust
        width = max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def worst_rows(rows: Sequence[Row], worst: int | None) -> Sequence[Row]:
    """Return the first `worst` rows of a table that is sorted by error, the worst first; None for all."""
    if worst is not None and (isinstance(worst, bool) or not isinstance(worst, int) or worst < 0):
        raise MXError(f"worst={worst!r} must be a number of rows, or None for all")
    return rows[:worst]


def ratio_text(ratio: float, more: str, less: str, equal: str) -> str:
    """Return a ratio in words.

    Args:
        ratio: a positive number.
        more, less: the words after the ratio, or after its reciprocal if it is below 1.
        equal: the words for a ratio that is 1 with one digit.
    """
    if max(ratio, 1 / ratio) < _EQUAL:
        return equal
    return f"{ratio:.1f}x {more}" if ratio > 1 else f"{1 / ratio:.1f}x {less}"
