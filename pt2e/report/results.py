"""The results of `sensitivity` and `compare_recipes`: rows, tables, JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pt2mx.analysis.samples import can_rank
from pt2mx.analysis.tables import text_table, worst_rows
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.files.output import write_text
from pt2mx.pt2e.report.advice import advice, quality_text
from pt2mx.pt2e.report.speed import Speed

#: the kinds of operands of a module that can be quantized
OPERANDS = ("both", "weights", "activations")


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
        """Return module -> row of a candidate, the costliest first.

        Args:
            candidate: as it was passed.
            operands: "both", "weights" or "activations".

        Raises:
            MXError: for another candidate, or other operands.
        """
        candidates = {row.candidate for row in self.rows}
        if candidate not in candidates:
            raise MXError(f"candidate={candidate!r} was not measured: {nearest(candidate, sorted(candidates))}")
        if operands not in OPERANDS:
            raise MXError(f"operands={operands!r} is unknown: {nearest(operands, OPERANDS)}")
        return {row.module: row for row in self.rows if (row.candidate, row.operands) == (candidate, operands)}

    def agreement(self, candidate: str, operands: str = "both") -> float:
        """Return Spearman's rank correlation of estimate and measurement, for the rows that `of` returns.

        It is NaN with fewer than two modules that have both.
        """
        rows = self.of(candidate, operands).values()
        both = [row for row in rows if not math.isnan(row.alone + row.estimate)]
        if len(both) < 2:
            return math.nan
        measured = _ranks([row.alone for row in both])
        estimated = _ranks([row.estimate for row in both])
        return torch.corrcoef(torch.tensor([measured, estimated]))[0, 1].item()

    def to_table(self, worst: int | None = 20) -> str:
        """Return a plain text table with the `worst` rows; None: all."""
        shown = _measured(self.rows, ("alone", "left", "estimate"))
        table = [("module", "candidate", "operands", *shown)]
        for row in worst_rows(self.rows, worst):
            numbers = _texts(row, shown, ".4g")
            table.append((row.module, row.candidate, row.operands, *numbers))
        whole = [f"{name}, everything: {value:.4g}" for name, value in self.whole.items()]
        return "\n".join([text_table(table, left=3), *whole])

    def __str__(self) -> str:
        return self.to_table()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the result as JSON, and write it to a file at `path`, if it is given."""
        content = {"metric": self.metric, "whole": as_json(self.whole), "rows": as_json([*map(asdict, self.rows)])}
        return write_text(json.dumps(content, allow_nan=False), path)


def as_json(value: object) -> object:
    """Return a tree of values for JSON: null for one that was not measured, text for an infinite distance."""
    return pytree.tree_map_only(float, _number_as_json, value)


def _number_as_json(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _measured(rows: Iterable[object], names: Iterable[str]) -> list[str]:
    """Return the names of the numbers that any row has."""
    return [name for name in names if not all(math.isnan(getattr(row, name)) for row in rows)]


def _texts(row: object, names: Iterable[str], digits: str) -> list[str]:
    """Return these numbers of a row; "" for one that was not measured."""
    numbers = [getattr(row, name) for name in names]
    return ["" if math.isnan(number) else format(number, digits) for number in numbers]


def _ranks(values: list[float]) -> list[float]:
    """Return the rank of each value from 0 on; equal values share their mean rank."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


#: the mark of a Pareto-optimal row
FRONT = "*"
#: columns that are shown where they were measured
_HEADS = {"error": "±", "milliseconds": "ms"}


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
        speed: the times of the recipes and of the float model in float32 and bfloat16, where they were measured.
    """

    metric: str
    larger_is_better: bool
    rows: tuple[RecipeRow, ...]
    speed: Speed | None = None

    @classmethod
    def of(
        cls, metric: str, larger_is_better: bool, rows: Iterable[RecipeRow], speed: Speed | None = None
    ) -> RecipeComparison:
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
        return cls(metric, larger_is_better, tuple(marked), speed)

    def front(self) -> tuple[RecipeRow, ...]:
        """Return the Pareto-optimal rows, the smallest first."""
        return tuple(row for row in self.rows if row.on_front)

    def to_table(self) -> str:
        """Return a plain text table, with the Pareto-optimal rows marked."""
        shown = _measured(self.rows, _HEADS)
        table = [("", "recipe", "bytes", "bits", self.metric, *(_HEADS[name] for name in shown))]
        for row in self.rows:
            numbers = ["", "", ""]
            if not math.isnan(row.quality):
                numbers = [f"{row.bytes:,}", f"{row.bits:.2f}", quality_text(row.quality)]
            table.append((FRONT if row.on_front else "", row.name, *numbers, *_texts(row, shown, ".3g")))
        header, *lines = text_table(table, left=2).splitlines()
        for i, row in enumerate(self.rows):
            if row.note or row.tied:
                lines[i] += f"  {row.note or f'too few samples to rank it against {row.tied}'}"
        better = "more is better" if self.larger_is_better else "less is better"
        legend = f"{FRONT} no other recipe is as small and as good; {self.metric}: {better}"
        speed = [] if self.speed is None else [f"\n{self.speed}\n"]
        return "\n".join([header, *lines, legend, *speed, self.advice()])

    def advice(self) -> str:
        """Return which recipe to take and why, in a sentence.

        It is the smallest one with a cosine of .99, a divergence of .05 nats, a SQNR of 20 dB, or in your own metric a
        loss of 1 % of the float model's number. The sentence also says what the samples do not show.
        """
        return advice(self)

    def __str__(self) -> str:
        return self.to_table()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the comparison as JSON, and write it to a file at `path`, if it is given; null means not measured."""
        content = {
            "metric": self.metric,
            "larger_is_better": self.larger_is_better,
            "advice": self.advice(),
            "rows": as_json([row.to_dict() for row in self.rows]),
            "speed": self.speed and self.speed.to_dict(),
        }
        return write_text(json.dumps(content, indent=1, allow_nan=False), path)
