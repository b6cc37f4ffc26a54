"""`compare_recipes`: a model in many recipes, by its size and its output."""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError, nearest
from pt2mx.fx.lower import lower_to_inductor
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.debug.batches import arguments_of, call, copied, several
from pt2mx.pt2e.debug.interpreter import check_module, unchanged
from pt2mx.pt2e.optimize.calibrate import named_padding_mask
from pt2mx.pt2e.optimize.optimize import optimize
from pt2mx.pt2e.prepare import check_exported, prepare_pt2e
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.config import get_default_mx_quantization_config
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import quantization_report
from pt2mx.pt2e.report.sizes import float_size
from pt2mx.pt2e.sensitivity.metrics import (
    METRICS,
    Distance,
    Quality,
    check_metric,
    mean_distance,
    name_of_metric,
    own_distance,
)
from pt2mx.pt2e.sensitivity.results import RecipeComparison, RecipeRow
from pt2mx.pt2e.user_errors import one_line

#: formats of the specification that no shipped recipe has, for weights and activations alike
FORMATS_BESIDE = ("mxfp8_e5m2", "mxfp6_e3m2")
#: what shipped recipes, which are for all models, have for some
_FOR_OTHERS = r"the setting .* matches no operator of the model|kv_cache is set, but"
#: the row of the model as it was
FLOAT = "float"


def compare_recipes(
    model: GraphModule | ExportedProgram,
    batches: Iterable[Any],
    recipes: Sequence[str] | Mapping[str, MXQuantizer] | None = None,
    *,
    metric: str | Distance = "cosine",
    calibration: Iterable[Any] = (),
    speed: bool = False,
    stage: Callable[[str], None] = lambda name: None,
) -> RecipeComparison:
    """Quantize a model by each of several recipes, and compare its size and its output with those of the float model.

    The model is exported once, and its outputs are computed once; of the quantized models one is held at a time. A
    recipe that fails is a row that says why.

    Args:
        model: the exported float model, which stays as it is.
        batches: to judge by, which no recipe has seen: a tensor, a tuple of positional or a dict of keyword arguments
            each.
        recipes: names of shipped recipes, files, and formats, for weights and activations alike; or name -> quantizer.
            None: all that pt2mx ships, and the formats that they leave out.
        metric: "cosine" of embeddings, "kl" of logits, "noise" under signal; or a function of the outputs and those of
            the float model, a number that is smaller for a better model: a distance, or a loss.
        calibration: batches for recipes with algorithms; the others look at none.
        speed: True measures the milliseconds of the first batch too, compiled, which takes a minute for each recipe.
        stage: is told the name of each recipe as it begins.

    Returns:
        The recipes and the float model, the smallest first, with the front of those that no other beats.

    Raises:
        MXError: for other objects, a model that is prepared or converted, an unknown recipe or metric, no batch,
            batches that the model does not take, and a float model whose output cannot be compared.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> found = pt2mx.compare_recipes(exported, [x], ["mxfp8", "mxfp4", "mxfp4_weight_only"])
        >>> [(row.name, row.bytes) for row in found.front()]
        [('mxfp4_weight_only', 2736), ('mxfp8', 5040), ('float', 18720)]
    """
    model = check_module(model.module() if isinstance(model, ExportedProgram) else model, "model")
    check_exported(model)
    check_metric(metric)
    quantizers = chosen_quantizers(recipes)
    batches, calibration = list(several(batches)), list(several(calibration, "calibration"))
    if not batches:
        raise MXError("there is no batch to judge the recipes by")
    stage(FLOAT)
    judge = _Judge(model, batches, metric, speed)
    rows = [judge.of_float()]
    for name, quantizer in quantizers.items():
        stage(name)
        try:
            with warnings.catch_warnings():
                if name in recipe.names():
                    warnings.filterwarnings("ignore", _FOR_OTHERS)
                row = judge.row(_quantized(model, quantizer, calibration))
        except Exception as error:  # of one recipe: the others go on
            row = RecipeRow(name, note=str(error) if isinstance(error, MXError) else one_line(error))
        rows.append(replace(row, name=name))
        gc.collect()  # graphs are in circles with their nodes
    return RecipeComparison.of(judge.quality.name, judge.quality.larger_is_better, rows)


def chosen_quantizers(recipes: object) -> dict[str, MXQuantizer]:
    """Name -> quantizer, of recipes as `compare_recipes` takes them.

    Raises:
        MXError: for what is none, and where there is none.
    """
    if isinstance(recipes, Mapping):
        for name, one in recipes.items():
            if not isinstance(one, MXQuantizer):
                raise MXError(f"the recipe {name!r} must be an MXQuantizer, not {type(one).__name__}")
        found = {str(name): one for name, one in recipes.items()}
    else:
        names = [*recipe.names(), *FORMATS_BESIDE] if recipes is None else recipes
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise MXError(f"recipes={recipes!r} must be a list of names, or a dict of quantizers")
        found = {str(name): _quantizer(str(name)) for name in names}
    if not found:
        raise MXError(f"there is no recipe to compare: give some of {', '.join(recipe.names())}")
    if FLOAT in found:
        raise MXError(f"{FLOAT!r} is the float model, which is always compared: give the recipe another name")
    return found


def _quantizer(name: str) -> MXQuantizer:
    """The quantizer of a recipe, or of a format."""
    if name in recipe.names() or os.path.isfile(name):
        return MXQuantizer.from_recipe(name)
    try:
        return MXQuantizer().set_global(get_default_mx_quantization_config(weight=name, activation=name))
    except MXError:
        raise MXError(
            f"no recipe, file or format {name!r}: {nearest(name, [*recipe.names(), *FORMATS_BESIDE])}"
        ) from None


def optimized_by(model: GraphModule, quantizer: MXQuantizer, calibration: Sequence[Any]) -> GraphModule:
    """The model with its weights rounded by the algorithms of a recipe, where it has some."""
    if quantizer.algorithms is None:
        return model
    with torch.no_grad():
        return optimize(model, quantizer, calibration, padding_mask=named_padding_mask(model))


def _quantized(model: GraphModule, quantizer: MXQuantizer, calibration: Sequence[Any]) -> GraphModule:
    """The model converted by a recipe."""
    converted = convert_pt2e(prepare_pt2e(optimized_by(model, quantizer, calibration), quantizer))
    if not any(operator.quantized for operator in quantization_report(converted).operators):
        raise MXError("it selects no operator of the model")
    return converted


class _Judge:
    """The float model's outputs, and what other models are beside them."""

    def __init__(self, model: GraphModule, batches: Sequence[Any], metric: str | Distance, speed: bool) -> None:
        self.model, self.batches, self.metric, self.speed = model, batches, metric, speed
        named = METRICS[metric].quality if isinstance(metric, str) else None
        self.quality = named or Quality(name_of_metric(metric), lambda distance: distance, False)
        with torch.no_grad(), unchanged(model):
            self.wanted = [call(model, batch) for batch in batches]
        self.own = own_distance(metric, self.wanted)

    def of_float(self) -> RecipeRow:
        """The row of the float model."""
        size = float_size(self.model)
        with unchanged(self.model):
            milliseconds = compiled_milliseconds(self.model, self.batches[0]) if self.speed else math.nan
        bits = 8 * size.bytes / max(size.values, 1)
        return RecipeRow(FLOAT, size.bytes, bits, self.quality.of(self.own), milliseconds)

    def row(self, converted: GraphModule) -> RecipeRow:
        """The row of a converted model, without a name."""
        report = quantization_report(converted)
        with torch.no_grad():
            pairs = ((call(converted, batch), want) for batch, want in zip(self.batches, self.wanted, strict=True))
            quality = self.quality.of(mean_distance(self.metric, pairs))
        row = RecipeRow("", report.bytes_after, report.effective_bits, quality)
        if math.isnan(quality):
            return replace(row, note="its output holds NaN")
        return replace(row, milliseconds=self._milliseconds(converted)) if self.speed else row

    def _milliseconds(self, converted: GraphModule) -> float:
        return compiled_milliseconds(lower_to_inductor(converted), self.batches[0])


#: of what is timed: the least number of runs, and the seconds that they take together
_RUNS, _SECONDS = 5, 1.0


def compiled_milliseconds(model: GraphModule, batch: Any) -> float:
    """Compile a graph, and give the median time of a batch."""
    torch.compiler.reset()
    compiled = torch.compile(model)
    arguments = arguments_of(model, batch)

    def call() -> Any:
        args, kwargs = copied(arguments)
        return compiled(*args, **kwargs)

    devices = {leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)}
    try:
        with torch.no_grad():
            for _ in range(2):  # the first compiles
                call()
            times: list[float] = []
            while len(times) < _RUNS or sum(times) < _SECONDS:
                times.append(_seconds(call, devices))
            return 1e3 * median(times)
    finally:
        torch.compiler.reset()


def _seconds(run: Callable[[], Any], devices: set[torch.device]) -> float:
    _wait(devices)
    begin = time.perf_counter()
    run()
    _wait(devices)
    return time.perf_counter() - begin


def _wait(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
