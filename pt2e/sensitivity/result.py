"""The result of `sensitivity`: a row for each module, candidate and kind of operands."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass

import torch

from pt2mx.analysis.tables import text_table, worst_rows
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.output import write_text

#: which operands of a module are quantized
OPERANDS = ("both", "weights", "activations")
_NUMBERS = ("alone", "left", "estimate")


@dataclass(frozen=True)
class SensitivityRow:
    """A module in a candidate format, by the model's output.

    `alone`: the metric where only this module is quantized; `left`: where all but this one are; `estimate`: that of
    `alone` by gradients. NaN where it was not asked for, infinite where the output became NaN. `operands`: "both",
    "weights" or "activations".
    """

    module: str
    candidate: str
    operands: str
    alone: float = math.nan
    left: float = math.nan
    estimate: float = math.nan

    @property
    def cost(self) -> float:
        """The cost of quantizing the module: `alone` where it was measured, else the estimate."""
        return self.estimate if math.isnan(self.alone) else self.alone


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivity of a model's output, the costliest modules first.

    `metric` says what the numbers are; `whole` has, by candidate, that of the model quantized as a whole (operands
    "both"), where it was measured.
    """

    metric: str
    rows: tuple[SensitivityRow, ...]
    whole: dict[str, float]

    def of(self, candidate: str, operands: str = "both") -> dict[str, SensitivityRow]:
        """The rows of a candidate, the costliest first.

        Args:
            candidate: as it was given.
            operands: "both", "weights" or "activations".

        Returns:
            Module -> row.

        Raises:
            MXError: for another candidate, or other operands.
        """
        if candidate not in (candidates := {row.candidate for row in self.rows}):
            raise MXError(f"candidate={candidate!r} was not measured: {nearest(candidate, sorted(candidates))}")
        if operands not in OPERANDS:
            raise MXError(f"operands={operands!r} is unknown: {nearest(operands, OPERANDS)}")
        return {row.module: row for row in self.rows if (row.candidate, row.operands) == (candidate, operands)}

    def agreement(self, candidate: str, operands: str = "both") -> float:
        """Spearman's rank correlation of estimate and measurement.

        Args:
            candidate: as it was given.
            operands: "both", "weights" or "activations".

        Returns:
            -1 to 1; NaN with fewer than two modules that have both.

        Raises:
            MXError: as `of`.
        """
        rows = self.of(candidate, operands).values()
        pairs = [(row.alone, row.estimate) for row in rows if not math.isnan(row.alone + row.estimate)]
        if len(pairs) < 2:
            return math.nan
        ranks = torch.tensor([_ranks([pair[i] for pair in pairs]) for i in (0, 1)])
        return torch.corrcoef(ranks)[0, 1].item()

    def to_table(self, worst: int | None = 20) -> str:
        """Give a table in plain text.

        Args:
            worst: how many rows; None for all.

        Returns:
            The table.
        """
        measured = [name for name in _NUMBERS if any(not math.isnan(getattr(row, name)) for row in self.rows)]
        cells = [
            (row.module, row.candidate, row.operands, *(_number(getattr(row, name)) for name in measured))
            for row in worst_rows(self.rows, worst)
        ]
        whole = "".join(f"\n{name}, everything: {value:.4g}" for name, value in self.whole.items())
        return f"{text_table([('module', 'candidate', 'operands', *measured), *cells], left=3)}{whole}"

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Give the result as JSON, and write it to a file.

        Args:
            path: of the file; None: none is written.

        Returns:
            The JSON.
        """
        rows = [{key: as_json(value) for key, value in asdict(row).items()} for row in self.rows]
        whole = {name: as_json(value) for name, value in self.whole.items()}
        return write_text(json.dumps({"metric": self.metric, "whole": whole, "rows": rows}, allow_nan=False), path)


def as_json(value: object) -> object:
    """A value as JSON has it: null was not measured, a distance may be infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


def _ranks(values: list[float]) -> list[float]:
    """The rank of each value from 0 on; equal values have the middle of theirs."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]
