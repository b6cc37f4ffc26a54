"""The command `pt2mx sensitivity`: which modules of a model stand which formats, and a recipe that follows from it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.argument import WORST_ROWS
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
from pt2mx.pt2e.format_observer import MXFormatObserver
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.suggest import suggest_config
from pt2mx.pt2e.sensitivity.results import Sensitivity
from pt2mx.pt2e.sensitivity.sensitivity import sensitivity
from pt2mx.pt2e.user_errors import user_errors
from pt2mx.spec import parse


def run(options: argparse.Namespace) -> Result:
    formats = _check(options)
    with Progress(4 if options.bits is None else 5) as progress:
        loaded = checked_model(options)
        batches = list(checked_batches(loaded, options).values())
        progress.begin("export")
        exported, _ = exported_module(loaded, options.part, options.allow_partial)
        progress.begin("measure")
        with user_errors("run the model"):
            found = sensitivity(
                exported,
                batches,
                formats,
                metric=metric_of(options, loaded),
                method=options.method,
                operands=[options.operands or ("both" if options.bits is None else "weights")],
                left=options.left,
                progress=sys.stderr.isatty(),
            )
        quantizer = None
        if options.bits is not None:
            progress.begin("suggest")
            quantizer = _suggested(exported, batches[0], found, formats, options)
    if quantizer is not None:
        quantizer.to_recipe(options.output)
        note(f"{options.output}: {_kinds(options.output)}")
    note(f"{options.model}, {counted(batches)}; {progress.seconds()}")
    text = found.to_table(None if options.full else WORST_ROWS)
    return Result(text, {**json.loads(found.to_json()), "output": options.output, "seconds": progress.times()})


def _check(options: argparse.Namespace) -> list[str]:
    """Return the candidates; an `MXError` for options that cannot be, before the work."""
    check_judged_model(options)
    if (options.bits is None) != (options.output is None):
        raise MXError("--bits and --output go together: the bits of the recipe, and the file to write it to")
    if options.bits is not None:
        check_written(options)
        if options.operands == "activations":
            raise MXError("--bits chooses formats of weights: give --operands weights or both")
    elif options.activation is not None:
        raise MXError("--activation is of the recipe: give --bits and --output, too")
    if options.left and options.method == "gradient":
        raise MXError("--left is measured: give --method forward or both")
    if options.activation is not None:
        options.activation = _spec(options.activation)
    formats = list(dict.fromkeys(map(_spec, names_in(options.formats))))
    if options.bits is not None:
        least = min(parse(one).effective_bits for one in formats)
        if not least <= options.bits < math.inf:
            raise MXError(f"--bits {options.bits:g} must be a number of at least {least:g}, the least of --formats")
    return formats


def _spec(name: str) -> str:
    """Return the spec of a format: that of the shipped recipe of the name, FP4 with scales by `even`, where there is
    one."""
    spec = parse(name)
    settings = recipe.read(name).settings if name in recipe.names() else []
    return next((str(config.weight) for kind, _, config in settings if kind == "global" and config), str(spec))


def _suggested(
    exported: GraphModule, batch: Batch, found: Sensitivity, formats: Sequence[str], options: argparse.Namespace
) -> MXQuantizer:
    """The quantizer of formats that cost the output least."""
    observer = MXFormatObserver.with_args(candidates=tuple(formats))
    config = MXQuantizationConfig(weight=formats[0], activation=options.activation, observer=observer)
    prepared = prepare_pt2e(exported, MXQuantizer().set_global(config))
    with torch.no_grad(), user_errors("run the model"):
        call(prepared, batch)  # the weights are the same in each
    return suggest_config(prepared, options.bits, objective="output", sensitivity=found)


def _kinds(path: str) -> str:
    """Count the modules of a recipe by the format of their weights."""
    weights = [config.weight for _, _, config in recipe.read(path).settings if config]
    counts = Counter(str(weight) for weight in weights if weight is not None)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
