"""`compare_recipes`: the size, quality and speed of a model in many recipes."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.analysis.agreement import tensors_in
from pt2mx.analysis.metrics import METRICS, Distance, Quality, check_metric, name_of_metric, own_distance
from pt2mx.analysis.samples import half_interval, mean_and_samples, sample_distances
from pt2mx.errors import MXError
from pt2mx.fx.graph.tensors import cast_floats, copy_sharing_tensors, floats_in
from pt2mx.fx.lower import lower_to_inductor
from pt2mx.pt2e.debug.batches import arguments_of, call, copied, several
from pt2mx.pt2e.debug.interpreter import check_module, unchanged
from pt2mx.pt2e.files.user_errors import one_line
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.prepare import check_exported, prepare_pt2e
from pt2mx.pt2e.flow.sizes import float_size
from pt2mx.pt2e.optimize.calibrate import named_padding_mask
from pt2mx.pt2e.optimize.optimize import optimize
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.advice import FLOAT
from pt2mx.pt2e.report.report import quantization_report
from pt2mx.pt2e.report.results import RecipeComparison, RecipeRow
from pt2mx.pt2e.report.speed import FLOATS, SpeedTest
from pt2mx.pt2e.sensitivity.tensor_scales import calibrate_tensor_scales

#: formats of the specification without a shipped recipe, for weights and activations alike
OTHER_FORMATS = ("mxfp8_e5m2", "mxfp6_e3m2")
#: warnings about settings of shipped recipes that some models do not need
_FOR_OTHERS = r"the setting .* matches no operator of the model|kv_cache is set, but"


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
    """Quantize a model with every recipe, and compare size and quality.

    The outputs of the float model are computed once, and without `speed` only one quantized model is in memory at a
    time. A recipe that fails gets a row with the reason.

    Args:
        model: the exported float model, which is not changed.
        batches: held-out batches that measure quality, each a tensor, a tuple of positional or a dict of keyword
            arguments.
        recipes: names of shipped recipes, files, and formats (for weights and activations alike); or name -> quantizer.
            None: all that pt2mx ships, and the formats without a recipe.
        metric: "cosine" for embeddings, "kl" for logits, "noise" below signal; or a function of the outputs and those
            of the float model that is smaller for a better model: a distance, or a loss.
        calibration: batches for recipes with algorithms and with static tensor scales; others need none. Without any,
            static tensor scales follow from `batches`.
        speed: True also measures the milliseconds of the first batch, in turns: of the float model in float32 and in
            bfloat16, and of each recipe in the model's dtype. All are compiled alike, which takes a minute for each,
            and all are in memory.
        stage: is called with the name of each recipe as it begins.

    Returns:
        The recipes and the float model, the smallest first, with the Pareto-optimal ones marked.

    Raises:
        MXError: for other objects, a model that is prepared or converted, an unknown recipe or metric, no batch,
            batches that the model does not take, and a float model whose output cannot be compared.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> result = pt2mx.compare_recipes(exported, [x], ["mxfp8", "mxfp4", "mxfp4_weight_only"])
        >>> [(row.name, row.bytes) for row in result.front()]
        [('mxfp4_weight_only', 2736), ('mxfp8', 5040), ('float', 18720)]
    """
    model = check_module(model, "model")
    check_exported(model)
    check_metric(metric)
    quantizers = chosen_quantizers(recipes)
    batches, calibration = list(several(batches)), list(several(calibration, "calibration"))
    if not batches:
        raise MXError("there is no batch to compare the recipes on")
    stage(FLOAT)
    evaluation, test = _Evaluation(model, batches, metric), SpeedTest(_device_of(batches[0]))
    rows = [evaluation.of_float()]
    for dtype in FLOATS if speed else ():
        test.add(dtype, partial(_compiled_float, model, getattr(torch, dtype), batches[0]))
    for name, quantizer in quantizers.items():
        stage(name)
        try:
            with warnings.catch_warnings():
                if name in recipe.names():
                    warnings.filterwarnings("ignore", _FOR_OTHERS)
                converted = _quantized(model, quantizer, calibration, batches)
                row = evaluation.row(converted)
            if speed:
                test.add(name, partial(_compiled_recipe, converted, batches[0]))
        except Exception as error:  # the other recipes go on
            row = RecipeRow(name, note=str(error) if isinstance(error, MXError) else one_line(error))
        rows.append(replace(row, name=name))
        gc.collect()  # graphs and nodes are reference cycles
    times = None
    if speed:
        stage("speed")
        times = test.run()
        torch.compiler.reset()
        names = {FLOAT: _dtype_of(model)}
        rows = [replace(row, milliseconds=times.milliseconds(names.get(row.name, row.name)).median) for row in rows]
    return RecipeComparison.of(evaluation.quality.name, evaluation.quality.larger_is_better, rows, times)


def chosen_quantizers(recipes: object) -> dict[str, MXQuantizer]:
    """Return name -> quantizer for recipes as `compare_recipes` takes them."""
    if isinstance(recipes, Mapping):
        for name, one in recipes.items():
            if not isinstance(one, MXQuantizer):
                raise MXError(f"the recipe {name!r} must be an MXQuantizer, not {type(one).__name__}")
        quantizers = {str(name): one for name, one in recipes.items()}
    else:
        names = [*recipe.names(), *OTHER_FORMATS] if recipes is None else recipes
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise MXError(f"recipes={recipes!r} must be a list of names, or a dict of quantizers")
        quantizers = {str(name): MXQuantizer.from_recipe(str(name)) for name in names}
    if not quantizers:
        raise MXError(f"there is no recipe to compare: give some of {', '.join(recipe.names())}")
    if taken := {FLOAT, *FLOATS} & quantizers.keys():
        raise MXError(f"{min(taken)!r} is the float model, which is always compared: give the recipe another name")
    return quantizers


def optimized_by(model: GraphModule, quantizer: MXQuantizer, calibration: Sequence[Any]) -> GraphModule:
    """Return the model with its weights rounded by the recipe's algorithms, if it has any."""
    if quantizer.algorithms is None:
        return model
    with torch.no_grad():
        return optimize(model, quantizer, calibration, padding_mask=named_padding_mask(model))


def _quantized(
    model: GraphModule, quantizer: MXQuantizer, calibration: Sequence[Any], batches: Sequence[Any]
) -> GraphModule:
    """Return the model converted with a recipe."""
    prepared = prepare_pt2e(optimized_by(model, quantizer, calibration), quantizer)
    calibrate_tensor_scales(prepared, calibration or batches)
    converted = convert_pt2e(prepared)
    if not any(operator.quantized for operator in quantization_report(converted).operators):
        raise MXError("it selects no operator of the model")
    return converted


class _Evaluation:
    """Compares models with the outputs of the float model."""

    def __init__(self, model: GraphModule, batches: Sequence[Any], metric: str | Distance) -> None:
        self.model, self.batches, self.metric = model, batches, metric
        if isinstance(metric, str):
            self.quality = METRICS[metric].quality
        else:
            self.quality = Quality(name_of_metric(metric), lambda distance: distance, False)
        with torch.no_grad(), unchanged(model):
            self.references = [call(model, batch) for batch in batches]
        self.distance_of_float = own_distance(metric, self.references)

    def of_float(self) -> RecipeRow:
        """Return the row of the float model."""
        size = float_size(self.model)
        bits = 8 * size.bytes / max(size.values, 1)
        _, samples = self._samples(self.references)
        return RecipeRow(FLOAT, size.bytes, bits, self.quality.from_distance(self.distance_of_float), samples=samples)

    def row(self, converted: GraphModule) -> RecipeRow:
        """Return the row of a converted model, without a name."""
        report = quantization_report(converted)
        with torch.no_grad():
            distance, samples = self._samples(call(converted, batch) for batch in self.batches)
        quality = self.quality.from_distance(distance)
        error = abs(self.quality.from_distance(distance + half_interval(samples)) - quality)
        note = "its output holds NaN" if math.isnan(quality) else ""
        return RecipeRow(
            "", report.bytes_after, report.effective_bits, quality, note=note, error=error, samples=samples
        )

    def _samples(self, outputs: Iterable[Any]) -> tuple[float, tuple[float, ...]]:
        """Return the mean distance of the outputs of all batches, and the distance of each sample."""
        distances: list[tuple[float, float]] = []
        for output, reference in zip(outputs, self.references, strict=True):
            distances += sample_distances(self.metric, output, reference)
        return mean_and_samples(distances)


def _compiled_float(model: GraphModule, dtype: torch.dtype, batch: Any) -> Callable[[], object]:
    """Return a call of the compiled float model in a dtype."""
    cast = cast_floats(copy_sharing_tensors(model), dtype)
    return _compiled(cast, floats_in(dtype, arguments_of(model, batch)))


def _compiled_recipe(converted: GraphModule, batch: Any) -> Callable[[], object]:
    """Return a call of a converted model, lowered and compiled."""
    return _compiled(lower_to_inductor(converted), arguments_of(converted, batch))


def _compiled(model: GraphModule, arguments: tuple[list[Any], dict[str, Any]]) -> Callable[[], object]:
    compiled = torch.compile(model)
    args, kwargs = copied(arguments)  # the model may write to its inputs
    return lambda: compiled(*args, **kwargs)


def _device_of(batch: Any) -> torch.device | str:
    return next((tensor.device for tensor in tensors_in(batch)), "cpu")


def _dtype_of(model: GraphModule) -> str:
    """Return the name of the dtype of the largest float tensor of a model."""
    floats = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    largest = max(floats, key=Tensor.numel, default=torch.empty(0))
    return str(largest.dtype).removeprefix("torch.")
