"""The command `pt2mx sensitivity`: measure which formats each module of a model tolerates, and suggest a recipe."""

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
from pt2mx.pt2e.cli.arguments import FORMATS, WORST_ROWS
from pt2mx.pt2e.cli.checks import check_device
from pt2mx.pt2e.cli.float_model import count_batches, exported_module, load_eval_batches, load_float_model, metric_of
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.models.float_models import Batch, call
from pt2mx.pt2e.observe.format_observer import MXFormatObserver
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.results import Sensitivity
from pt2mx.pt2e.report.suggest import suggest_config
from pt2mx.pt2e.sensitivity.sensitivity import sensitivity
from pt2mx.spec import parse


def run(options: argparse.Namespace) -> Result:
    check_device(options.device)
    formats = _formats(options)
    with Progress(4 if options.bits is None else 5) as progress:
        loaded = load_float_model(options)
        batches = list(load_eval_batches(loaded, options).values())
        progress.begin("export")
        exported, *_ = exported_module(loaded, options.part, options.allow_partial)
        progress.begin("measure")
        with user_errors("run the model"):
            measured = sensitivity(
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
            quantizer = _suggested(exported, batches[0], measured, formats, options)
    if quantizer is not None:
        quantizer.to_recipe(options.output)
        note(f"{options.output}: {_count_formats(options.output)}")
    note(f"{options.model}, {count_batches(batches)}; {progress.seconds()}")
    text = measured.to_table(None if options.full else WORST_ROWS)
    return Result(text, {**json.loads(measured.to_json()), "output": options.output, "seconds": progress.times()})


def _formats(options: argparse.Namespace) -> list[str]:
    """Return the formats to try; raise an `MXError` for fewer bits than they have."""
    if options.activation is not None:
        options.activation = _spec(options.activation)
    formats = list(dict.fromkeys(map(_spec, options.formats or FORMATS)))
    if options.bits is not None:
        least = min(parse(one).effective_bits for one in formats)
        if not least <= options.bits < math.inf:
            raise MXError(f"--bits {options.bits:g} must be a number of at least {least:g}, the least of --formats")
    return formats


def _spec(name: str) -> str:
    """Return the spec of a format. A shipped recipe of that name decides: its FP4 has scales by `even`."""
    spec = parse(name)
    settings = recipe.read(name).settings if name in recipe.names() else []
    return next((str(config.weight) for kind, _, config in settings if kind == "global" and config), str(spec))


def _suggested(
    exported: GraphModule, batch: Batch, measured: Sensitivity, formats: Sequence[str], options: argparse.Namespace
) -> MXQuantizer:
    """Return the quantizer with the formats that cost the output least."""
    observer = MXFormatObserver.with_args(candidates=tuple(formats))
    config = MXQuantizationConfig(weight=formats[0], activation=options.activation, observer=observer)
    prepared = prepare_pt2e(exported, MXQuantizer().set_global(config))
    with torch.no_grad(), user_errors("run the model"):
        call(prepared, batch)  # one is enough: only the weights' formats are chosen
    return suggest_config(prepared, options.bits, objective="output", sensitivity=measured)


def _count_formats(path: str) -> str:
    weights = [config.weight for _, _, config in recipe.read(path).settings if config]
    counts = Counter(str(weight) for weight in weights if weight is not None)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
