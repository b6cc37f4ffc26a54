"""Errors against the float model: sums over batches, and the table of all operators that `compare_stages` returns."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pt2mx.analysis.agreement import ErrorSums, comparable, tensors_in
from pt2mx.analysis.tables import text_table, worst_rows
from pt2mx.errors import MXError, listed, nearest
from pt2mx.pt2e.files.output import write_text

#: the operator in the row of an output of the model
OUTPUT = "output"
_COLUMNS = ("stage", "module", "operator", "node", "isolated dB", "cosine", "max", "propagated dB", "cosine", "max")
#: the number of columns of words
_WORDS = 4
_LEAD = (
    "Each operator compared with the float model's, the worst first. Isolated: its error for the float model's inputs; "
    "propagated: its error in a run of the stage. SQNR in dB, higher is better."
)


def relative_error(got: Any, want: Any) -> float:
    """Return the norm of the difference of two trees of tensors over the norm of the second, the largest among their
    tensors; 0 without floating tensors, Inf where the number of tensors, a shape, a NaN or an Inf differs."""
    got_tensors, want_tensors = tensors_in(got), tensors_in(want)
    if len(got_tensors) != len(want_tensors):
        return math.inf
    return max(map(_relative_error, got_tensors, want_tensors), default=0.0)


def _relative_error(got: Tensor, want: Tensor) -> float:
    if not comparable(got, want):
        return math.inf if got.shape != want.shape else 0.0
    finite = want.isfinite()
    if not torch.allclose(got[~finite].double(), want[~finite].double(), rtol=0, atol=0, equal_nan=True):
        return math.inf
    distance = (got[finite].double() - want[finite].double()).norm().item()
    scale = want[finite].double().norm().item()
    if math.isnan(distance):
        return math.inf
    if scale:
        return distance / scale
    return math.inf if distance else 0.0


@dataclass
class OperatorErrors:
    """The errors of an operator in a stage.

    `module` and `operator` say which operator, `node` is its name in the float model. `isolated` is the error for the
    float model's inputs, `propagated` the error in a run of the stage.
    """

    module: str
    operator: str
    node: str
    isolated: ErrorSums = field(default_factory=ErrorSums)
    propagated: ErrorSums = field(default_factory=ErrorSums)
    stage: str = ""


@dataclass(frozen=True)
class StageComparison:
    """The errors of the operators of all stages, worst isolated error first, outputs last.

    `missing` lists, for each stage, the operators of the float model that the stage does not have.
    """

    rows: tuple[OperatorErrors, ...]
    missing: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, stages: Mapping[str, Mapping[str, OperatorErrors]], operators: Iterable[str]) -> StageComparison:
        """Return the comparison for the rows of each stage and the operators of the float model."""
        operators = dict.fromkeys(operators)
        missing: dict[str, tuple[str, ...]] = {}
        everything: list[OperatorErrors] = []
        for name, rows in stages.items():
            if not rows.keys().isdisjoint(operators):  # of a function only the outputs are compared
                missing[name] = tuple(key for key in operators if key not in rows)
            for row in rows.values():
                row.stage = name
                everything.append(row)
        return cls(tuple(sorted(everything, key=_badness)), missing)

    def of_stage(self, name: str) -> tuple[OperatorErrors, ...]:
        """Return the rows of one stage, worst first; an MXError names the stages."""
        names = dict.fromkeys(row.stage for row in self.rows)
        if name not in names:
            raise MXError(f"there is no stage {name!r}: {nearest(name, names)}")
        return tuple(row for row in self.rows if row.stage == name)

    def to_table(self, worst: int | None = 20) -> str:
        """Return a plain text table of the `worst` operators (None: all) and the outputs, and a line for each stage
        that lacks operators."""
        operators = [row for row in self.rows if row.operator != OUTPUT]
        outputs = self.rows[len(operators) :]
        kept = [*worst_rows(operators, worst), *outputs]
        table = text_table([_COLUMNS, *map(_cells, kept)], left=_WORDS)
        return "\n".join([table, *self._missing_lines()])

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return all rows as JSON, and write them to a file at `path`, if it is given."""
        return write_text(json.dumps([_numbers(row) for row in self.rows], indent=1), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return all rows as an HTML page, and write it to a file at `path`, if it is given."""
        from pt2mx.pt2e.page.page import table_page  # above this folder: loaded where a page is asked for

        rows = list(map(_cells, self.rows))
        return write_text(table_page("Stage comparison", _LEAD, _COLUMNS, rows, _WORDS, self._missing_lines()), path)

    def _missing_lines(self) -> list[str]:
        missing = self.missing.items()
        return [f"{stage} has nothing of {listed(keys)}: not compared" for stage, keys in missing if keys]


def _badness(row: OperatorErrors) -> tuple[bool, float, float]:
    """Return the sort key: outputs last, then by the isolated error, then by the propagated one."""
    isolated, propagated = row.isolated.sqnr, row.propagated.sqnr
    return (
        row.operator == OUTPUT,
        math.inf if math.isnan(isolated) else isolated,
        math.inf if math.isnan(propagated) else propagated,
    )


def _cells(row: OperatorErrors) -> tuple[str, ...]:
    cells = [row.stage, row.module, row.operator, row.node]
    for error in (row.isolated, row.propagated):
        if error.values:
            cells += [f"{error.sqnr:.1f}", f"{error.cosine:.6f}", f"{error.max:.3g}"]
        else:
            cells += [""] * 3
    return tuple(cells)


def _numbers(row: OperatorErrors) -> dict[str, Any]:
    content: dict[str, Any] = {"stage": row.stage, "module": row.module, "operator": row.operator, "node": row.node}
    for name, error in (("isolated", row.isolated), ("propagated", row.propagated)):
        numbers = {"sqnr": error.sqnr, "cosine": error.cosine, "max": error.max}
        content[name] = {key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}
    return content
