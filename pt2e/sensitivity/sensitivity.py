"""`sensitivity`: the cost of each module in each format, measured on the model's output."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator
from torch.export import ExportedProgram
from torch.fx import GraphModule
from tqdm import tqdm

from pt2mx.analysis.metrics import METRICS, Distance, check_metric, mean_distance, name_of_metric, own_distance
from pt2mx.errors import MXError, check_integer, nearest
from pt2mx.pt2e.debug.batches import call, several
from pt2mx.pt2e.debug.interpreter import check_module, unchanged
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig, get_default_mx_quantization_config
from pt2mx.pt2e.report.results import OPERANDS, Sensitivity, SensitivityRow
from pt2mx.pt2e.sensitivity.candidates import Candidate
from pt2mx.pt2e.sensitivity.estimate import Key, estimates

#: method -> (measures, estimates)
METHODS = {"forward": (True, False), "gradient": (False, True), "both": (True, True)}


def sensitivity(
    model: GraphModule | ExportedProgram,
    batches: Iterable[Any],
    candidates: Sequence[str] | Mapping[str, MXQuantizationConfig] = ("mxfp4", "mxfp6", "mxfp8"),
    *,
    metric: str | Distance = "kl",
    method: str = "forward",
    operands: Sequence[str] = ("both",),
    left: bool = False,
    draws: int = 1,
    seed: int = 0,
    progress: bool = False,
) -> Sensitivity:
    """Measure how much quantizing each module alone changes the model's output.

    `method="forward"` runs the model once per module and candidate. `"gradient"` estimates the result by `draws`
    backward passes per batch (`pt2mx.pt2e.sensitivity.estimate`); it is inaccurate for large errors. `"both"` does
    both, and `Sensitivity.agreement` compares them.

    Args:
        model: the exported float model.
        batches: inputs, each a tensor, a tuple of positional or a dict of keyword arguments.
        candidates: formats, for weights and activations alike, or name -> config.
        metric: "kl" for logits, "cosine" for embeddings, "noise" over signal; or a function of the outputs and the
            float model's outputs, smaller for a better model.
        method: "forward", "gradient" or "both".
        operands: any of "both", "weights" and "activations": what to quantize of a module.
        left: True also measures the fully quantized model with each module left in float.
        draws: backward passes per batch of `"gradient"`. Each item of a batch (dimension 0) is a sample in each pass; n
            samples give a cost to within about sqrt(2 / n) of its value.
        seed: of the random directions of `"gradient"`.
        progress: True shows a bar on stderr.

    Returns:
        The rows, costliest first.

    Raises:
        MXError: for other objects or names, without a batch, where a candidate quantizes nothing, for a float model
            whose output cannot be compared, and for `"gradient"` where no gradients pass.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> result = pt2mx.sensitivity(exported, [x], ["mxfp4", "mxfp8"], metric="noise", method="both")
        >>> result.of("mxfp8")["0"].alone < result.of("mxfp4")["0"].alone
        True
    """
    model = check_module(model, "model")
    measures, estimated = _check(metric, method, operands)
    check_integer("draws", draws, 1)
    check_integer("seed", seed)
    batches = list(several(batches))
    if not batches:
        raise MXError("there is no batch to be sensitive to")
    prepared = {name: Candidate.of(model, config, batches) for name, config in _configs(candidates).items()}
    for name, candidate in prepared.items():
        if not candidate.modules:
            raise MXError(f"the candidate {name!r} quantizes nothing of the model")
    numbers: dict[Key, dict[str, Any]] = {}
    for name, candidate in prepared.items():
        for module in candidate.modules:
            for which in operands:
                if candidate.observers(module, which):
                    numbers[module, name, which] = {}
    if not numbers:
        raise MXError(f"the candidates quantize no {' and no '.join(operands)} of any module: give other operands")
    whole: dict[str, float] = {}
    steps = len(numbers) * measures * (1 + left) + len(batches) * estimated
    with torch.no_grad(), tqdm(total=steps, disable=not progress, leave=False) as bar:
        if measures:
            with unchanged(model):
                references = [call(model, batch) for batch in batches]
            own_distance(metric, references)
            for name, candidate in prepared.items():
                everything = dict.fromkeys(candidate.modules, "both")
                whole[name] = _measure(candidate, everything, batches, references, metric)
            for (module, name, which), row in numbers.items():
                candidate = prepared[name]
                row["alone"] = _measure(candidate, {module: which}, batches, references, metric)
                bar.update()
                if left:
                    others = {**dict.fromkeys(candidate.modules, "both"), module: _OTHER_OPERANDS[which]}
                    row["left"] = _measure(candidate, others, batches, references, metric)
                    bar.update()
        if estimated and not callable(metric):
            totals: dict[Key, float] = defaultdict(float)
            count = 0.0
            generator = Generator().manual_seed(seed)
            for batch in batches:
                terms, rows = estimates(model, prepared, tuple(operands), batch, metric, draws, generator)
                count += rows
                for key, term in terms.items():
                    totals[key] += term
                bar.update()
            if not totals:
                raise MXError("no gradient of an output reaches a module: give method='forward'")
            for key, total in totals.items():
                numbers[key]["estimate"] = _nan_to_inf(total / count)
    # no number: no gradient reached the module
    result = [SensitivityRow(*key, **values) for key, values in numbers.items() if values]
    result.sort(key=lambda row: -row.cost if not math.isnan(row.cost) else math.inf)
    return Sensitivity(name_of_metric(metric), tuple(result), whole)


#: the operands of a module that stay quantized when these are left in float
_OTHER_OPERANDS = {"both": "none", "weights": "activations", "activations": "weights"}


def _measure(
    candidate: Candidate,
    modules: Mapping[str, str],
    batches: Sequence[Any],
    references: Sequence[Any],
    metric: str | Distance,
) -> float:
    """Return the metric over all batches with these modules quantized."""
    with candidate.quantizing(modules) as model, unchanged(model):
        pairs = ((call(model, batch), reference) for batch, reference in zip(batches, references, strict=True))
        return _nan_to_inf(mean_distance(metric, pairs))


def _nan_to_inf(distance: float) -> float:
    """Count outputs that became NaN as infinitely far."""
    return math.inf if math.isnan(distance) else distance


def _check(metric: object, method: object, operands: object) -> tuple[bool, bool]:
    if not isinstance(method, str) or method not in METHODS:
        raise MXError(f"method={method!r} is unknown: {nearest(str(method), METHODS)}")
    measures, estimated = METHODS[method]
    check_metric(metric)
    if estimated and not isinstance(metric, str):
        raise MXError(f"method={method!r} needs one of {', '.join(METRICS)}: a function works with method='forward'")
    names = operands if isinstance(operands, Sequence) and not isinstance(operands, str) else ()
    if not names or any(name not in OPERANDS for name in names):
        raise MXError(f"operands={operands!r} must be a list of {', '.join(map(repr, OPERANDS))}")
    return measures, estimated


def _configs(candidates: object) -> dict[str, MXQuantizationConfig]:
    if isinstance(candidates, Mapping):
        named = dict(candidates)
        for name, config in named.items():
            if not isinstance(config, MXQuantizationConfig):
                raise MXError(f"the candidate {name!r} must be an MXQuantizationConfig, not {type(config).__name__}")
    elif not isinstance(candidates, Iterable):
        raise MXError(f"candidates must be formats, or a dict of configs, not {type(candidates).__name__}")
    else:
        formats = [candidates] if isinstance(candidates, str) else list(candidates)
        named = {str(one): get_default_mx_quantization_config(weight=one, activation=one) for one in formats}
    if not named:
        raise MXError("there is no candidate: give formats, such as ['mxfp4', 'mxfp8']")
    return named
