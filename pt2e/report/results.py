"""The results of `sensitivity` and `compare_recipes`: rows, tables, JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from pt2mx.analysis.samples import can_rank
from pt2mx.analysis.tables import text_table, worst_rows
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.files.output import write_text
from pt2mx.pt2e.report.advice import advice, quality_text

#: the kinds of operands of a module that can be quantized
OPERANDS = ("both", "weights", "activations")
_NUMBERS = ("alone", "left", "estimate")


@dataclass(frozen=True)
class SensitivityRow:
    """The cost of a module in a candidate format, measured on the model's output.

    Args:
        module: its name.
        candidate: the format or config.
        operands: "both", "weights" or "activations".
        alone: the metric with only this module quantized.
        left: the metric with every other module quantized.
        estimate: the estimate of `alone` by gradients.

    Numbers are NaN where they were not requested, and infinite where the output became NaN.
    """

    module: str
    candidate: str
    operands: str
    alone: float = math.nan
    left: float = math.nan
    estimate: float = math.nan

    @property
    def cost(self) -> float:
        """Return the cost of quantizing the module: `alone` where it was measured, else the estimate."""
        return self.estimate if math.isnan(self.alone) else self.alone


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivity of a model's output, the costliest modules first.

    Args:
        metric: its name.
        rows: one for each module, candidate and kind of operands.
        whole: candidate -> the metric of the model quantized as a whole (operands "both"), where it was measured.
    """

    metric: str
    rows: tuple[SensitivityRow, ...]
    whole: dict[str, float]

    def of(self, candidate: str, operands: str = "both") -> dict[str, SensitivityRow]:
        """Return the rows of a candidate, the costliest first.

        Args:
            candidate: as it was passed.
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
        """Return Spearman's rank correlation of estimate and measurement.

        Args:
            candidate: as it was passed.
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
        """Return a plain text table.

        Args:
            worst: number of rows; None: all.

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

    def __str__(self) -> str:
        return self.to_table()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the result as JSON, and write it to a file.

        Args:
            path: of the file; None: no file is written.

        Returns:
            The JSON.
        """
        rows = [{key: as_json(value) for key, value in asdict(row).items()} for row in self.rows]
        whole = {name: as_json(value) for name, value in self.whole.items()}
        return write_text(json.dumps({"metric": self.metric, "whole": whole, "rows": rows}, allow_nan=False), path)


def as_json(value: object) -> object:
    """Return a value for JSON: null for one that was not measured, text for an infinite distance."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


def _ranks(values: list[float]) -> list[float]:
    """Return the rank of each value from 0 on; equal values share their mean rank."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


#: the mark of a Pareto-optimal row
FRONT = "*"


@dataclass(frozen=True)
class RecipeRow:
    """A model in one recipe.

    Args:
        name: of the recipe; "float" is the float model.
        bytes: of all parameters and buffers; 0 where the recipe failed.
        bits: per value of them, on average.
        quality: in the metric of the comparison; NaN where the recipe failed.
        milliseconds: per batch, compiled; NaN where it was not measured.
        on_front: True if the recipe is Pareto-optimal: no other is as small and as good, and better in one of both. Of
            equal recipes the first is.
        note: the reason of a failure, else "".
        error: half of the 95 % interval of the quality, from the spread of its samples; NaN for float
            and with fewer than two samples.
        tied: the smaller recipe on the front that is better or worse by too little for the number of samples; else "".
        samples: the distances from the float model's output, one for each sample, with the quality's as their mean.
    """

    name: str
    bytes: int = 0
    bits: float = math.nan
    quality: float = math.nan
    milliseconds: float = math.nan
    on_front: bool = False
    note: str = ""
    error: float = math.nan
    tied: str = ""
    samples: tuple[float, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the samples."""
        return {key: value for key, value in asdict(self).items() if key != "samples"}


@dataclass(frozen=True)
class RecipeComparison:
    """Recipes by size, the smallest first and failures last. `str` is the table, and a sentence that recommends one.

    Args:
        metric: the name of the quality.
        larger_is_better: False for a metric that is a cost.
        rows: one for each recipe, and one for the float model.
    """

    metric: str
    larger_is_better: bool
    rows: tuple[RecipeRow, ...]

    @classmethod
    def of(cls, metric: str, larger_is_better: bool, rows: Iterable[RecipeRow]) -> RecipeComparison:
        """Sort rows, and mark those that are Pareto-optimal, and those that the samples do not rank."""
        sign = 1 if larger_is_better else -1
        ordered = sorted(rows, key=lambda row: (math.isnan(row.quality), row.bytes, -sign * row.quality))
        best: RecipeRow | None = None
        marked = []
        for row in ordered:  # smallest first, and best first within a size: a row on the front beats all before
            on_front = sign * row.quality > (sign * best.quality if best else -math.inf)
            tied = best.name if best and not can_rank(row.samples, best.samples) else ""
            best = row if on_front else best
            marked.append(replace(row, on_front=on_front, tied=tied))
        return cls(metric, larger_is_better, tuple(marked))

    def front(self) -> tuple[RecipeRow, ...]:
        """Return the Pareto-optimal rows, the smallest first.

        Returns:
            The rows with `on_front`.
        """
        return tuple(row for row in self.rows if row.on_front)

    def to_table(self) -> str:
        """Return a plain text table.

        Returns:
            The table; Pareto-optimal rows are marked.
        """
        extra = {"error": "±", "milliseconds": "ms"}
        shown = {name: head for name, head in extra.items() if any(not math.isnan(getattr(r, name)) for r in self.rows)}
        header = ("", "recipe", "bytes", "bits", self.metric, *shown.values())
        table = text_table([header, *(_cells(row, shown) for row in self.rows)], left=2).splitlines()
        notes = ["", *(row.note or _doubt(row) for row in self.rows)]
        lines = [f"{line}  {note}" if note else line for line, note in zip(table, notes, strict=True)]
        better = "more is better" if self.larger_is_better else "less is better"
        legend = f"{FRONT} no other recipe is as small and as good; {self.metric}: {better}"
        return "\n".join([*lines, legend, self.advice()])

    def advice(self) -> str:
        """Return which recipe to take and why, in a sentence.

        Returns:
            The smallest recipe with a cosine of .99, a divergence of .05 nats, a SQNR of 20 dB, or in your own metric a
            loss of 1 % of the float model's number; and what the samples do not show.
        """
        return advice(self)

    def __str__(self) -> str:
        return self.to_table()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the comparison as JSON, and write it to a file; null means not measured.

        Args:
            path: of the file; None: no file is written.

        Returns:
            The JSON.

        Raises:
            MXError: where no file can be written at `path`.
        """
        rows = [{name: as_json(value) for name, value in row.to_dict().items()} for row in self.rows]
        content = {
            "metric": self.metric,
            "larger_is_better": self.larger_is_better,
            "advice": self.advice(),
            "rows": rows,
        }
        return write_text(json.dumps(content, indent=1, allow_nan=False), path)


def _doubt(row: RecipeRow) -> str:
    return f"too few samples to rank it against {row.tied}" if row.tied else ""


def _cells(row: RecipeRow, extra: Iterable[str]) -> tuple[str, ...]:
    failed = math.isnan(row.quality)
    numbers = ("", "", "") if failed else (f"{row.bytes:,}", f"{row.bits:.2f}", quality_text(row.quality))
    values = (getattr(row, name) for name in extra)
    return FRONT if row.on_front else "", row.name, *numbers, *("" if math.isnan(v) else f"{v:.3g}" for v in values)
