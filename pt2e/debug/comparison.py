"""The result of `compare_stages`: a table of errors, as text, JSON and HTML."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from pt2mx.analysis.tables import text_table
from pt2mx.pt2e.debug.differences import Difference
from pt2mx.pt2e.output import whole_file

#: the operator of a row that stands for an output of the model
OUTPUT = "output"
#: most names in a line
_MOST = 5
_COLUMNS = ("stage", "module", "operator", "node", "isolated dB", "cosine", "max", "propagated dB", "cosine", "max")
_STYLE = """:root { color-scheme: light dark } body { font: 14px system-ui, sans-serif; margin: 2em }
table { border-collapse: collapse } th, td { padding: .2em .7em; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums } th { border-bottom: 1px solid gray }"""


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
        """
        return tuple(row for row in self.rows if row.stage == name)

    def to_table(self, worst: int | None = 20) -> str:
        """Give a table in plain text.

        Args:
            worst: how many operators; None for all. Outputs are always in it.

        Returns:
            The table, a line a row, and one for each stage in which operators are missing.
        """
        operators = [row for row in self.rows if row.operator != OUTPUT]
        kept = [*operators[:worst], *(row for row in self.rows if row.operator == OUTPUT)]
        table = text_table([_COLUMNS, *(_cells(row) for row in kept)], left=4)
        return "\n".join([table, *(_left_out(name, keys) for name, keys in self.missing.items() if keys)])

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Give all rows as JSON, and write them to a file.

        Args:
            path: of the file; None: none is written.

        Returns:
            The JSON.
        """
        text = json.dumps([_numbers(row) for row in self.rows], indent=1)
        return _written(text, path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Give all rows as an HTML page, and write it to a file.

        Args:
            path: of the file; None: none is written.

        Returns:
            The page.
        """
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        lines = "".join(f"<tr>{_html(_cells(row))}</tr>\n" for row in self.rows)
        page = (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>Stages</title><style>{_STYLE}'
            f"</style></head><body><h1>Stages</h1><table><tr>{head}</tr>\n{lines}</table></body></html>\n"
        )
        return _written(page, path)


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


def _html(cells: tuple[str, ...]) -> str:
    return "".join(f'<td class="number">{c}</td>' if i > 3 else f"<td>{escape(c)}</td>" for i, c in enumerate(cells))


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        with whole_file(path) as file:
            file.write(text.encode())
    return text
