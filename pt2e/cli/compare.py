"""The command `pt2mx compare`: a model by all recipes and formats, its size and its quality."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.errors import MXError
from pt2mx.pt2e.cli.checked_model import checked_batches, checked_model, exported_module
from pt2mx.pt2e.cli.judged_model import (
    check_judged_model,
    check_written,
    counted,
    metric_of,
    names_in,
)
from pt2mx.pt2e.cli.models import Batch, call
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.shipped import tasks
from pt2mx.pt2e.report.report import quantization_report
from pt2mx.pt2e.sensitivity.compare_recipes import (
    FLOAT,
    OTHER_FORMATS,
    chosen_quantizers,
    compare_recipes,
    optimized_by,
)
from pt2mx.pt2e.sensitivity.results import RecipeComparison
from pt2mx.pt2e.user_errors import user_errors

#: how the names of models begin -> whose recipes are compared by default; those of other tasks are left out
_TASKS = {"minilm": "encoder", "torchvision:": "cnn"}


def run(options: argparse.Namespace) -> Result:
    check_judged_model(options)
    names = _default_recipes(options.model) if options.recipes is None else names_in(options.recipes)
    if options.output is not None:
        check_written(options, names, suffixes=(".html", ".htm"))
    quantizers = chosen_quantizers(names)  # a typo should not cost the loading of a model
    for quantizer in quantizers.values() if options.optimize is not None else ():
        quantizer.set_algorithms(None if options.optimize == "none" else options.optimize)
    with Progress(3 + len(quantizers) + (options.output is not None)) as progress:
        loaded = checked_model(options)
        batches = list(checked_batches(loaded, options).values())
        seen, judged = _divided(batches, quantizers)
        progress.begin("export")
        exported, _ = exported_module(loaded, options.part, options.allow_partial)
        with user_errors("run the model"):
            found = compare_recipes(
                exported,
                judged,
                quantizers,
                metric=metric_of(options, loaded),
                calibration=seen,
                speed=options.speed,
                stage=progress.begin,
            )
            if options.output is not None:
                progress.begin("page")
                _write_page(exported, seen, judged, found, quantizers, options)
    note(f"{options.model}, {counted(judged)}; {progress.seconds()}")
    return Result(str(found), {**json.loads(found.to_json()), "seconds": progress.times()})


def _default_recipes(model: str) -> list[str]:
    """Return the recipes and formats for a model of that name."""
    task = next((task for start, task in _TASKS.items() if model.startswith(start)), None)
    others = tuple(f"{other}_" for other in tasks() if task not in (None, other))
    return [name for name in (*recipe.names(), *OTHER_FORMATS) if not name.startswith(others)]


def _write_page(
    exported: GraphModule,
    seen: Sequence[Batch],
    judged: Sequence[Batch],
    found: RecipeComparison,
    quantizers: dict[str, MXQuantizer],
    options: argparse.Namespace,
) -> None:
    """Write the page of the recipe of best quality, which is quantized once more, and calibrated for its statistics."""
    names = [row.name for row in found.front() if row.name != FLOAT]
    if not names:
        raise MXError(f"no recipe works, so there is no page: {found.rows[-1].note}")
    optimized = optimized_by(exported, quantizers[names[-1]], seen)
    prepared = prepare_pt2e(optimized, quantizers[names[-1]])
    with torch.no_grad():
        for batch in judged:
            call(prepared, batch)
    converted = convert_pt2e(prepared)
    named = names[-1] if names[-1] in recipe.names() else quantizers[names[-1]]
    report = quantization_report(converted)
    report.to_html(
        options.output, model=options.model, recipe=named, comparison=found, before=exported, after=converted
    )


def _divided(batches: list[Batch], quantizers: dict[str, MXQuantizer]) -> tuple[list[Batch], list[Batch]]:
    """Return the batches for algorithms, and those to judge by, which are others where there are several."""
    if not any(look_at_inputs(one.algorithms or ()) for one in quantizers.values()):
        return [], batches
    half = len(batches) // 2
    if half == 0:
        note("there is one batch: recipes with algorithms are judged by what they have seen")
        return batches, batches
    note(f"{half} of {len(batches)} batches are for the algorithms of recipes, the others judge")
    return batches[:half], batches[half:]
