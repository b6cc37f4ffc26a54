"""The command `pt2mx recipes`: list them, show one, check a file, print the schema for editors."""

from __future__ import annotations

import argparse
import json

from pt2mx.analysis.tables import text_table
from pt2mx.pt2e.cli.models import load_model
from pt2mx.pt2e.cli.stage import user_errors
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.recipe_schema import recipe_schema
from pt2mx.pt2e.report.report import quantization_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=argparse.ArgumentParser)
    listed = actions.add_parser("list", help="the shipped recipes, a line each")
    listed.add_argument("--json", action="store_true", help="as JSON")
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


def _list(options: argparse.Namespace) -> None:
    rows = [{"recipe": name, "description": recipe.description(name)} for name in recipe.names()]
    print(json.dumps(rows, indent=1) if options.json else text_table([tuple(row.values()) for row in rows]))


def _show(options: argparse.Namespace) -> None:
    recipe.read(options.recipe)  # an error names what is wrong in it
    print(recipe.text(options.recipe), end="")


def _check(options: argparse.Namespace) -> None:
    quantizer = MXQuantizer.from_recipe(options.recipe)
    if options.model is None:
        print(f"{options.recipe}: a recipe with {len(recipe.read(options.recipe).settings)} settings")
        return
    with user_errors("load the model"):
        loaded = load_model(options.model)
    with user_errors("export the model"):
        exported = loaded.export().module()
    with user_errors("prepare the model"):
        print(quantization_report(prepare_pt2e(exported, quantizer)).to_table())


def _schema(options: argparse.Namespace) -> None:
    print(json.dumps(recipe_schema(), indent=1))
