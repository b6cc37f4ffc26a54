"""`quantize_with_accuracy_control`: quantize as much of a model as its quality allows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.analysis.metrics import number_of
from pt2mx.errors import MXError
from pt2mx.pt2e.debug.batches import call, several
from pt2mx.pt2e.debug.interpreter import check_module, unchanged
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.observed_modules import observed_modules
from pt2mx.pt2e.flow.prepare import check_quantizer, prepare_pt2e
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.sensitivity.tensor_scales import calibrate_tensor_scales

#: returns the quality of a model that takes the arguments of the exported one; larger is better
Evaluate = Callable[[GraphModule], float]


class ControlledModel(NamedTuple):
    """The result of `quantize_with_accuracy_control`.

    `model` is the converted model, `quantizer` reproduces it, `lifted` are the modules that stay in float, `score` is
    the quality, and `float_score` the quality of the float model.
    """

    model: GraphModule
    quantizer: MXQuantizer
    lifted: tuple[str, ...]
    score: float
    float_score: float


def quantize_with_accuracy_control(
    model: GraphModule | ExportedProgram,
    quantizer: MXQuantizer,
    evaluate: Evaluate,
    max_drop: float,
    *,
    order: Sequence[str] | None = None,
    batches: Iterable[Any] = (),
) -> ControlledModel:
    """Quantize a model, but keep its costliest modules in float, so that quality drops by at most `max_drop`.

    The modules are lifted to float in one fixed order. A binary search finds the fewest: about log2(modules)
    evaluations. Without `order`, each module is first quantized alone and evaluated, to find the order.

    Args:
        model: the exported float model.
        quantizer: for the whole model, without settings for single modules that may be lifted.
        evaluate: returns the quality of a graph module, a number, larger is better.
        max_drop: the largest allowed drop of quality below the float model.
        order: the modules, costliest first, as in `list(result.of(candidate))` of `sensitivity`. None: it is measured.
        batches: calibration batches, for the statistics in the report and for static tensor scales; they change no
            other result.

    Returns:
        The converted model, the quantizer with the lifted modules, their names, and both scores.

    Raises:
        MXError: for other objects, an unknown module in `order`, an evaluation that is no number, and where no module
            can be quantized within `max_drop`.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> def evaluate(graph):  # minus the relative error
        ...     return -((graph(x) - model(x)).norm() / model(x).norm()).item()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4")
        >>> result = pt2mx.quantize_with_accuracy_control(exported, quantizer, evaluate, 0.17)
        >>> len(result.lifted), result.score > -0.17
        (1, True)
    """
    model = check_module(model, "model")
    check_quantizer(quantizer, MXQuantizer)
    if isinstance(max_drop, bool) or not isinstance(max_drop, int | float) or not 0 <= max_drop < math.inf:
        raise MXError(f"max_drop={max_drop!r} must be a number of at least 0")
    if not callable(evaluate):
        raise MXError(f"evaluate must be a function of a graph module, not {type(evaluate).__name__}")
    if isinstance(order, str) or not isinstance(order, Iterable | None):
        raise MXError(f"order must be a list of modules, not {type(order).__name__}")
    batches = list(several(batches))
    float_score = _score(evaluate, model)
    if math.isinf(float_score):
        raise MXError(f"evaluate gave {float_score} for the float model: no drop from it can be told")
    prepared = observed_modules(prepare_pt2e(model, quantizer))
    modules = [name for name, one in prepared.items() if one.config is not None and name]
    if not modules:
        raise MXError("the quantizer quantizes nothing of the model in a module with a name: there is nothing to lift")
    if order is None:
        scores = {}
        for name in modules:
            alone = _without(quantizer, [other for other in modules if other != name])
            scores[name] = _score(evaluate, _converted(model, alone, batches, statistics=False))
        order = sorted(modules, key=scores.__getitem__)
    elif unknown := [name for name in order if name not in modules]:
        raise MXError(f"the quantizer quantizes no module {unknown[0]!r}: order names some of {', '.join(modules)}")
    order = list(dict.fromkeys([*order, *modules]))

    low, high, best = 0, len(order), None
    while low < high:
        count = 0 if (low, high) == (0, len(order)) else (low + high) // 2  # nothing lifted often suffices
        reduced = _without(quantizer, order[:count])
        converted = _converted(model, reduced, batches)
        score = _score(evaluate, converted)
        if float_score - score <= max_drop:
            high, best = count, ControlledModel(converted, reduced, tuple(order[:count]), score, float_score)
        else:
            low = count + 1
    if best is None:
        raise MXError(
            f"the quality drops by more than max_drop={max_drop} though {order[-1]!r} alone is quantized, the least "
            "costly module: allow more, or use a format of more bits"
        )
    return best


def _without(quantizer: MXQuantizer, modules: Sequence[str]) -> MXQuantizer:
    """Return a copy of the quantizer that skips these modules."""
    reduced = copy.deepcopy(quantizer)
    for name in modules:
        reduced.set_module_name(name, None)
    return reduced


def _converted(
    model: GraphModule, quantizer: MXQuantizer, batches: Sequence[Any], statistics: bool = True
) -> GraphModule:
    """Return the model converted; without statistics, batches run only for tensor scales."""
    prepared = prepare_pt2e(model, quantizer)
    if not statistics:
        calibrate_tensor_scales(prepared, batches)
        return convert_pt2e(prepared)
    with torch.no_grad():
        for batch in batches:
            call(prepared, batch)
    return convert_pt2e(prepared)


def _score(evaluate: Evaluate, model: GraphModule) -> float:
    with torch.no_grad(), unchanged(model):
        score = evaluate(model)
    number = number_of(score, "evaluate", "larger")
    if math.isnan(number):
        raise MXError("evaluate gave nan: it must give a number, larger for a better model")
    return number
