"""The result of `compare_stages`: a table of errors, as text, JSON and HTML."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pt2mx.analysis.tables import text_table, worst_rows
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.debug.differences import Difference
from pt2mx.pt2e.output import write_text
from pt2mx.pt2e.report.page.page import table_page

#: the operator of a row that stands for an output of the model
OUTPUT = "output"
#: most names in a line
_MOST = 5
_COLUMNS = ("stage", "module", "operator", "node", "isolated dB", "cosine", "max", "propagated dB", "cosine", "max")
#: how many of them are words
_WORDS = 4
_LEAD = (
    "Each operator beside the float model's, the worst first. Isolated: its error for the float model's inputs; "
    "propagated: that in a run of the stage. SQNR in dB, higher is better."
)


@dataclass
class Compared:
    """An operator in a form of the model, beside the float one.

    `module` and `operator` say which, `node` is its name in the float model; `isolated` is the error for the float
    model's inputs, `propagated` that in a run of the form.
    """

    module: str
    operator: str
    node: str
    isolated: Difference = field(default_factory=Difference)
    propagated: Difference = field(default_factory=Difference)
    stage: str = ""


@dataclass(frozen=True)
class StageComparison:
    """The errors of the operators of all stages, worst isolated error first; outputs last. `missing` has, by stage, the
    operators of the float model that were not found in it."""

    rows: tuple[Compared, ...]
    missing: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, stages: Mapping[str, Mapping[str, Compared]], operators: Iterable[str]) -> StageComparison:
        """The comparison of the rows of each stage, and of the operators of the float model."""
        operators = list(operators)
        graphs = {name: found for name, found in stages.items() if any(key in found for key in operators)}
        missing = {name: tuple(key for key in operators if key not in found) for name, found in graphs.items()}
        rows = [row for found in stages.values() for row in found.values()]
        for name, found in stages.items():
            for row in found.values():
                row.stage = name
        return cls(tuple(sorted(rows, key=_badness)), missing)

    def of_stage(self, name: str) -> tuple[Compared, ...]:
        """The rows of one stage, worst first.

        Args:
            name: of the stage.

        Returns:
            Its rows.

        Raises:
            MXError: for another stage.
        """
        if name not in (names := dict.fromkeys(row.stage for row in self.rows)):
            raise MXError(f"there is no stage {name!r}: {nearest(name, names)}")
        return tuple(row for row in self.rows if row.stage == name)

    def to_table(self, worst: int | None = 20) -> str:
        """Give a table in plain text.

        Args:
            worst: how many operators; None for all. Outputs are always in it.

        Returns:
            The table, a line a row, and one for each stage in which operators are missing.
        """
        operators = [row for row in self.rows if row.operator != OUTPUT]
        kept = [*worst_rows(operators, worst), *(row for row in self.rows if row.operator == OUTPUT)]
        table = text_table([_COLUMNS, *(_cells(row) for row in kept)], left=_WORDS)
        return "\n".join([table, *self._missing_lines()])

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Give all rows as JSON, and write them to a file.

        Args:
            path: of the file; None: none is written.

        Returns:
            The JSON.
        """
        return write_text(json.dumps([_numbers(row) for row in self.rows], indent=1), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Give all rows as an HTML page, and write it to a file.

        Args:
            path: of the file; None: none is written.

        Returns:
            The page.
        """
        rows = [_cells(row) for row in self.rows]
        return write_text(table_page("Stages", _LEAD, _COLUMNS, rows, _WORDS, self._missing_lines()), path)

    def _missing_lines(self) -> list[str]:
        return [_left_out(name, keys) for name, keys in self.missing.items() if keys]


def _left_out(stage: str, keys: tuple[str, ...]) -> str:
    more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
    return f"{stage} has nothing of {', '.join(keys[:_MOST])}{more}: not compared"


def _badness(row: Compared) -> tuple[bool, float, float]:
    """The key of sorting: outputs last, then the isolated, then the propagated error."""
    isolated, propagated = (math.inf if math.isnan(d.sqnr) else d.sqnr for d in (row.isolated, row.propagated))
    return row.operator == OUTPUT, isolated, propagated


def _cells(row: Compared) -> tuple[str, ...]:
    errors = [cell for d in (row.isolated, row.propagated) for cell in _error(d)]
    return row.stage, row.module, row.operator, row.node, *errors


def _error(one: Difference) -> tuple[str, str, str]:
    return (f"{one.sqnr:.1f}", f"{one.cosine:.6f}", f"{one.max:.3g}") if one.values else ("", "", "")


def _numbers(row: Compared) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(row, name) for name in ("stage", "module", "operator", "node")}
    for name in ("isolated", "propagated"):
        one: Difference = getattr(row, name)
        numbers = {"sqnr": one.sqnr, "cosine": one.cosine, "max": one.max}
        found[name] = {key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}
    return found
