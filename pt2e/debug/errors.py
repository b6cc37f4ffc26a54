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
from torch.utils import _pytree as pytree

from pt2mx.analysis.sums import sqnr_db
from pt2mx.analysis.tables import text_table, worst_rows
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.files.output import write_text

#: the operator in the row of an output of the model
OUTPUT = "output"
#: the most names in a line
_SHOWN = 5
_COLUMNS = ("stage", "module", "operator", "node", "isolated dB", "cosine", "max", "propagated dB", "cosine", "max")
#: the number of columns of words
_WORDS = 4
_LEAD = (
    "Each operator compared with the float model's, the worst first. Isolated: its error for the float model's inputs; "
    "propagated: its error in a run of the stage. SQNR in dB, higher is better."
)


@dataclass
class ErrorSums:
    """The error of values against a reference, summed over batches.

    Values that are NaN or Inf in the reference (a masked score) are left out.
    """

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    energy: float = 0.0
    max: float = 0.0
    values: int = 0

    def add(self, got: Tensor, want: Tensor) -> None:
        """Add a pair of tensors of one shape."""
        finite = want.isfinite()
        got, want = got[finite].double(), want[finite].double()
        if not want.numel():
            return
        self.signal += want.square().sum().item()
        self.noise += (got - want).square().sum().item()
        self.product += (got * want).sum().item()
        self.energy += got.square().sum().item()
        self.max = max(self.max, (got - want).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item())
        self.values += want.numel()

    @property
    def sqnr(self) -> float:
        """Return the SQNR in dB: Inf where nothing differs, NaN where nothing was compared."""
        if not self.values:
            return math.nan
        return sqnr_db(self.signal, math.inf if math.isnan(self.noise) else self.noise)

    @property
    def cosine(self) -> float:
        """Return the cosine of the two vectors of all values."""
        scale = math.sqrt(self.signal * self.energy)
        return self.product / scale if scale else float(self.signal == self.energy)


def comparable(got: object, want: object) -> bool:
    """Return whether both are floating tensors of one shape."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return False
    return got.shape == want.shape and got.is_floating_point() and want.is_floating_point()


def relative_error(got: Any, want: Any) -> float:
    """Return the norm of the difference of two outputs over the norm of the second, the largest among their tensors.

    Args:
        got: a tensor, or a tree of tensors.
        want: another one of the same structure.

    Returns:
        The error; 0 without floating tensors, Inf where the number of tensors, a shape, a NaN or an Inf differs.
    """
    got_tensors, want_tensors = _tensors(got), _tensors(want)
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


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


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
        operators = list(operators)
        missing: dict[str, tuple[str, ...]] = {}
        everything: list[OperatorErrors] = []
        for name, rows in stages.items():
            absent = tuple(key for key in operators if key not in rows)
            if len(absent) < len(operators):  # of a function only the outputs are compared
                missing[name] = absent
            for row in rows.values():
                row.stage = name
                everything.append(row)
        return cls(tuple(sorted(everything, key=_badness)), missing)

    def of_stage(self, name: str) -> tuple[OperatorErrors, ...]:
        """Return the rows of one stage, worst first.

        Args:
            name: the name of the stage.

        Returns:
            The rows.

        Raises:
            MXError: for another stage.
        """
        if name not in (names := dict.fromkeys(row.stage for row in self.rows)):
            raise MXError(f"there is no stage {name!r}: {nearest(name, names)}")
        return tuple(row for row in self.rows if row.stage == name)

    def to_table(self, worst: int | None = 20) -> str:
        """Return a table in plain text.

        Args:
            worst: the number of operators; None for all. Outputs are always in the table.

        Returns:
            The table, a line for each row, and a line for each stage that lacks operators.
        """
        operators = [row for row in self.rows if row.operator != OUTPUT]
        kept = [*worst_rows(operators, worst), *(row for row in self.rows if row.operator == OUTPUT)]
        table = text_table([_COLUMNS, *(_cells(row) for row in kept)], left=_WORDS)
        return "\n".join([table, *self._missing_lines()])

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return all rows as JSON, and write them to a file.

        Args:
            path: the path of the file; None writes none.

        Returns:
            The JSON.
        """
        return write_text(json.dumps([_numbers(row) for row in self.rows], indent=1), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return all rows as an HTML page, and write it to a file.

        Args:
            path: the path of the file; None writes none.

        Returns:
            The page.
        """
        from pt2mx.pt2e.page.page import table_page  # above this folder: loaded where a page is asked for

        rows = [_cells(row) for row in self.rows]
        return write_text(table_page("Stage comparison", _LEAD, _COLUMNS, rows, _WORDS, self._missing_lines()), path)

    def _missing_lines(self) -> list[str]:
        return [_missing_line(name, keys) for name, keys in self.missing.items() if keys]


def _missing_line(stage: str, keys: tuple[str, ...]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{stage} has nothing of {', '.join(keys[:_SHOWN])}{more}: not compared"


def _badness(row: OperatorErrors) -> tuple[bool, float, float]:
    """Return the sort key: outputs last, then by the isolated error, then by the propagated one."""
    isolated, propagated = (math.inf if math.isnan(e.sqnr) else e.sqnr for e in (row.isolated, row.propagated))
    return row.operator == OUTPUT, isolated, propagated


def _cells(row: OperatorErrors) -> tuple[str, ...]:
    errors = [cell for e in (row.isolated, row.propagated) for cell in _error_cells(e)]
    return row.stage, row.module, row.operator, row.node, *errors


def _error_cells(error: ErrorSums) -> tuple[str, str, str]:
    return (f"{error.sqnr:.1f}", f"{error.cosine:.6f}", f"{error.max:.3g}") if error.values else ("", "", "")


def _numbers(row: OperatorErrors) -> dict[str, Any]:
    entry: dict[str, Any] = {name: getattr(row, name) for name in ("stage", "module", "operator", "node")}
    for name in ("isolated", "propagated"):
        error: ErrorSums = getattr(row, name)
        numbers = {"sqnr": error.sqnr, "cosine": error.cosine, "max": error.max}
        entry[name] = {key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}
    return entry
