"""The command `pt2mx recipes`: list them, show one, check a file, print the schema for editors."""

from __future__ import annotations

import argparse
import json

from pt2mx.pt2e.cli.checked_model import exported_module
from pt2mx.pt2e.cli.command import Parser
from pt2mx.pt2e.cli.models import load_model
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.cli.stage import Stages, user_errors
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer import measured, recipe
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.recipe_schema import recipe_schema
from pt2mx.pt2e.report.report import quantization_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    listed = actions.add_parser("list", help="the shipped recipes, a line each")
    listed.set_defaults(run=_list)
    shown = actions.add_parser("show", help="the YAML of a recipe")
    shown.add_argument("recipe", help="the name of a shipped recipe, or a file")
    shown.set_defaults(run=_show)
    checked = actions.add_parser("check", help="read a recipe, and say what it would select of a model")
    checked.add_argument("recipe", help="a file, or the name of a shipped recipe")
    checked.add_argument("--model", help="as `pt2mx quantize` takes it")
    checked.set_defaults(run=_check)
    schema = actions.add_parser("schema", help="the JSON schema, for editors")
    schema.set_defaults(run=_schema)


def _list(options: argparse.Namespace) -> Result:
    names, found = recipe.names(), measured.tasks()
    rows = [
        {"recipe": name, "description": recipe.description(name), "measured": measured.summary(name)} for name in names
    ]
    models = "; ".join(
        f"{name}: {task['model']}, float {task['metric']} {task['float']}" for name, task in found.items()
    )
    text = "\n".join(f"{row['recipe']}\n  {row['description']}\n  {row['measured']}" for row in rows)
    return Result(f"{text}\n\nmeasured on {models}", {"recipes": rows})


def _show(options: argparse.Namespace) -> Result:
    settings = recipe.read(options.recipe)  # an error names what is wrong in it
    text = recipe.text(options.recipe)
    return Result(text.rstrip("\n"), {"recipe": options.recipe, "text": text, "settings": len(settings.settings)})


def _check(options: argparse.Namespace) -> Result:
    quantizer = MXQuantizer.from_recipe(options.recipe)
    settings = len(recipe.read(options.recipe).settings)
    data: dict[str, object] = {"recipe": options.recipe, "settings": settings}
    if options.model is None:
        return Result(f"{options.recipe}: a recipe with {settings} setting{'s' * (settings != 1)}", data)
    with Stages(3) as progress:
        with user_errors("load the model"):
            loaded = load_model(options.model)
        progress.begin("export")
        exported = exported_module(loaded)
        progress.begin("prepare")
        with user_errors("prepare the model"):
            report = quantization_report(prepare_pt2e(exported, quantizer))
    return Result(report.to_table(), {**data, "model": options.model, "report": json.loads(report.to_json())})


def _schema(options: argparse.Namespace) -> Result:
    schema = recipe_schema()
    return Result(json.dumps(schema, indent=1), schema)
