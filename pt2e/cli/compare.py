"""The command `pt2mx compare`: quantize a model with every recipe and compare size and quality."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.errors import MXError
from pt2mx.pt2e.cli.checks import check_device
from pt2mx.pt2e.cli.float_model import count_batches, exported_module, load_eval_batches, load_float_model, metric_of
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.models.float_models import Batch, call
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.shipped import tasks
from pt2mx.pt2e.report.advice import recommended
from pt2mx.pt2e.report.report import quantization_report
from pt2mx.pt2e.report.results import RecipeComparison
from pt2mx.pt2e.sensitivity.compare_recipes import (
    OTHER_FORMATS,
    chosen_quantizers,
    compare_recipes,
    optimized_by,
)

#: prefix of a model's name -> its task; the recipes of other tasks are not compared by default
_TASKS = {"minilm": "encoder", "torchvision:": "cnn"}


def run(options: argparse.Namespace) -> Result:
    check_device(options.device)
    names = options.recipes or _default_recipes(options.model)
    quantizers = chosen_quantizers(names)  # a typo should not cost the loading of a model
    for quantizer in quantizers.values() if options.optimize is not None else ():
        quantizer.set_algorithms(None if options.optimize == "none" else options.optimize)
    with Progress(3 + len(quantizers) + options.speed + (options.output is not None)) as progress:
        loaded = load_float_model(options)
        batches = list(load_eval_batches(loaded, options).values())
        calibration, evaluation = _split(batches, quantizers)
        progress.begin("export")
        exported, *_ = exported_module(loaded, options.part, options.allow_partial)
        with user_errors("run the model"):
            comparison = compare_recipes(
                exported,
                evaluation,
                quantizers,
                metric=metric_of(options, loaded),
                calibration=calibration,
                speed=options.speed,
                stage=progress.begin,
            )
            if options.output is not None:
                progress.begin("page")
                _write_page(exported, calibration, evaluation, comparison, quantizers, options)
    note(f"{options.model}, {count_batches(evaluation)}; {progress.seconds()}")
    return Result(str(comparison), {**json.loads(comparison.to_json()), "seconds": progress.times()})


def _default_recipes(model: str) -> list[str]:
    task = next((task for start, task in _TASKS.items() if model.startswith(start)), None)
    others = tuple(f"{other}_" for other in tasks() if task not in (None, other))
    return [name for name in (*recipe.names(), *OTHER_FORMATS) if not name.startswith(others)]


def _write_page(
    exported: GraphModule,
    calibration: Sequence[Batch],
    evaluation: Sequence[Batch],
    comparison: RecipeComparison,
    quantizers: dict[str, MXQuantizer],
    options: argparse.Namespace,
) -> None:
    """Quantize the model once more with the recommended recipe, calibrate it, and write the page of its report."""
    row = recommended(comparison)
    if row is None:
        raise MXError(f"no recipe works, so there is no page: {comparison.rows[-1].note}")
    quantizer = quantizers[row.name]
    prepared = prepare_pt2e(optimized_by(exported, quantizer, calibration), quantizer)
    with torch.no_grad():
        for batch in evaluation:
            call(prepared, batch)
    converted = convert_pt2e(prepared)
    shown = row.name if row.name in recipe.names() else quantizer
    report = quantization_report(converted)
    report.to_html(
        options.output, model=options.model, recipe=shown, comparison=comparison, before=exported, after=converted
    )


def _split(batches: list[Batch], quantizers: dict[str, MXQuantizer]) -> tuple[list[Batch], list[Batch]]:
    """Split the batches into those for the recipes' algorithms, and held-out ones for the comparison."""
    if not any(look_at_inputs(one.algorithms or ()) for one in quantizers.values()):
        return [], batches
    half = len(batches) // 2
    if half == 0:
        note("there is one batch: recipes with algorithms are compared on the batch that they calibrate with")
        return batches, batches
    note(f"{half} of {len(batches)} batches are for the algorithms of recipes, the others for the comparison")
    return batches[:half], batches[half:]
