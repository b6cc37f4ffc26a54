"""The command `pt2mx recipes`: list them, show one, check a file, print the schema for editors."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pt2mx.analysis.tables import text_table
from pt2mx.pt2e.checkpoints.destinations import DESTINATIONS, cell, for_destinations, needs
from pt2mx.pt2e.cli.float_model import exported_module
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.models.float_models import load_model
from pt2mx.pt2e.quantizer import recipe, shipped
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.recipe_schema import recipe_schema
from pt2mx.pt2e.report.report import quantization_report

_LEGEND = (
    "form: without what the destination has no place for, and for recipes of a task in formats that it has; see "
    "`pt2mx recipes show RECIPE --for DESTINATION`. no: `pt2mx quantize --for` says why"
)


def run_list(options: argparse.Namespace) -> Result:
    rows = []
    for name in shipped.names():
        row: dict[str, Any] = {
            "recipe": name,
            "description": recipe.description(name),
            "measured": shipped.summary(name),
        }
        row["needs"] = needs(MXQuantizer.from_recipe(name))
        row["destinations"] = {destination: cell(name, destination) for destination in DESTINATIONS}
        rows.append(row)
    models = "; ".join(
        f"{name}: {task['model']}, float {task['metric']} {task['float']}" for name, task in shipped.tasks().items()
    )
    lines = [line for row in rows for line in _lines_of(row)]
    matrix = text_table([("where it runs", *DESTINATIONS), *map(_cells, rows)])
    text = [*lines, "", f"measured on {models}", "", matrix, "", _LEGEND]
    return Result("\n".join(text), {"recipes": rows})


def _lines_of(row: dict[str, Any]) -> list[str]:
    runs = [f"  as it runs: {', '.join(row['needs'])}"] if row["needs"] else []
    return [row["recipe"], f"  {row['description']}", f"  {row['measured']}", *runs]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return row["recipe"], *row["destinations"].values()


def run_show(options: argparse.Namespace) -> Result:
    settings = recipe.read(options.recipe)  # raises an error that names what is wrong
    text = recipe.text(options.recipe)
    if options.destinations:
        text = for_destinations(options.recipe, options.destinations).quantizer.to_recipe()
    return Result(text.rstrip("\n"), {"recipe": options.recipe, "text": text, "settings": len(settings.settings)})


def run_check(options: argparse.Namespace) -> Result:
    quantizer = MXQuantizer.from_recipe(options.recipe)
    settings = len(recipe.read(options.recipe).settings)
    data: dict[str, object] = {"recipe": options.recipe, "settings": settings}
    if options.model is None:
        return Result(f"{options.recipe}: a recipe with {settings} setting{'s' * (settings != 1)}", data)
    with Progress(3) as progress:
        with user_errors("load the model"):
            loaded = load_model(options.model)
        progress.begin("export")
        exported, *_ = exported_module(loaded, allow_partial=True)
        progress.begin("prepare")
        with user_errors("prepare the model"):
            report = quantization_report(prepare_pt2e(exported, quantizer))
    return Result(report.to_table(), {**data, "model": options.model, "report": json.loads(report.to_json())})


def run_schema(options: argparse.Namespace) -> Result:
    schema = recipe_schema()
    return Result(json.dumps(schema, indent=1), schema)
