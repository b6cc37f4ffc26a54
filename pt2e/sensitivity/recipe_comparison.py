"""The result of `compare_recipes`: a row for each recipe, and the front of those that no other beats."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from pt2mx.analysis.tables import text_table
from pt2mx.pt2e.output import write_text
from pt2mx.pt2e.sensitivity.result import as_json

#: the mark of a row on the front
FRONT = "*"


@dataclass(frozen=True)
class RecipeRow:
    """A model in one recipe.

    Args:
        name: of the recipe; "float" is the model as it was.
        bytes: of all parameters and buffers; 0 where the recipe failed.
        bits: of a value of them, on the average.
        quality: by the metric of the comparison; NaN where the recipe failed.
        milliseconds: of a batch, compiled; NaN where it was not measured.
        on_front: True where no other recipe is as small and as good, and in one of both better; of equals, the first.
        note: the reason of what failed; "" where nothing did.
    """

    name: str
    bytes: int = 0
    bits: float = math.nan
    quality: float = math.nan
    milliseconds: float = math.nan
    on_front: bool = False
    note: str = ""


@dataclass(frozen=True)
class RecipeComparison:
    """Recipes by size, the smallest first and failures last. `str` is the table.

    Args:
        metric: the name of the quality.
        larger_is_better: False for a metric that is a cost.
        rows: a row for each recipe, and one for the float model.
    """

    metric: str
    larger_is_better: bool
    rows: tuple[RecipeRow, ...]

    @classmethod
    def of(cls, metric: str, larger_is_better: bool, rows: Iterable[RecipeRow]) -> RecipeComparison:
        """The comparison of rows in any order, with the front found."""
        sign = 1 if larger_is_better else -1
        ordered = sorted(rows, key=lambda row: (math.isnan(row.quality), row.bytes, -sign * row.quality))
        best, marked = -math.inf, []
        for (
            row
        ) in ordered:  # from the smallest on, the best of each size first: what is no better than before is beaten
            found = sign * row.quality > best
            best = sign * row.quality if found else best
            marked.append(replace(row, on_front=found))
        return cls(metric, larger_is_better, tuple(marked))

    def front(self) -> tuple[RecipeRow, ...]:
        """The rows that no other beats, the smallest first.

        Returns:
            Those of them with `on_front`.
        """
        return tuple(row for row in self.rows if row.on_front)

    def to_table(self) -> str:
        """Give a table in plain text.

        Returns:
            The table; rows of the front have a mark.
        """
        timed = any(not math.isnan(row.milliseconds) for row in self.rows)
        header = ("", "recipe", "bytes", "bits", self.metric, *(["ms"] if timed else []))
        table = text_table([header, *(_cells(row, timed) for row in self.rows)], left=2).splitlines()
        notes = ["", *(row.note for row in self.rows)]
        lines = [f"{line}  {note}" if note else line for line, note in zip(table, notes, strict=True)]
        better = "more is better" if self.larger_is_better else "less is better"
        return "\n".join([*lines, f"{FRONT} no other recipe is as small and as good; {self.metric}: {better}"])

    def __str__(self) -> str:
        return self.to_table()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Give the comparison as JSON, and write it to a file; null stands for what was not measured.

        Args:
            path: of the file; None: none is written.

        Returns:
            The JSON.

        Raises:
            MXError: where no file can be written at `path`.
        """
        rows = [{name: as_json(value) for name, value in asdict(row).items()} for row in self.rows]
        found = {"metric": self.metric, "larger_is_better": self.larger_is_better, "rows": rows}
        return write_text(json.dumps(found, indent=1, allow_nan=False), path)


def _cells(row: RecipeRow, timed: bool) -> tuple[str, ...]:
    failed = math.isnan(row.quality)
    numbers = ("", "", "") if failed else (f"{row.bytes:,}", f"{row.bits:.2f}", f"{row.quality:.5g}")
    milliseconds = "" if math.isnan(row.milliseconds) else f"{row.milliseconds:.3g}"
    return FRONT if row.on_front else "", row.name, *numbers, *([milliseconds] if timed else [])
