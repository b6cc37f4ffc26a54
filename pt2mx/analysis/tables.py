"""Tables in plain text."""

from collections.abc import Sequence


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
