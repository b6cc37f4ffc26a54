"""`sensitivity`: what each module in each format costs the model's output."""

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

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.debug.batches import call, several
from pt2mx.pt2e.debug.interpreter import check_module, unchanged
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig, get_default_mx_quantization_config
from pt2mx.pt2e.sensitivity.candidates import Form
from pt2mx.pt2e.sensitivity.estimate import estimates
from pt2mx.pt2e.sensitivity.metrics import METRICS, Distance, check_metric, mean_distance, name_of_metric, own_distance
from pt2mx.pt2e.sensitivity.results import OPERANDS, Sensitivity, SensitivityRow

#: method -> whether it measures, and whether it estimates
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
    """Find what quantizing each module by itself costs the output of the model.

    `method="forward"` runs the model once for each module and candidate. `"gradient"` estimates the same by `draws`
    backward passes a batch (`pt2mx.pt2e.sensitivity.estimate`), and does not know large errors. `"both"` does both, so
    that `Sensitivity.agreement` can compare them.

    Args:
        model: the exported float model.
        batches: of inputs: a tensor, a tuple of positional or a dict of keyword arguments each.
        candidates: formats, of weights and activations alike, or name -> config.
        metric: "kl" of logits, "cosine" of embeddings, "noise" over signal; or a function of the outputs and those of
            the float model, smaller for a better model.
        method: "forward", "gradient" or "both".
        operands: of "both", "weights" and "activations": what is quantized of a module.
        left: True measures too the model as a whole with each module left in float.
        draws: of `"gradient"`: backward passes a batch. Each item of a batch (dimension 0) is a sample of each, and n
            samples tell a cost to about sqrt(2 / n) of it.
        seed: of the directions of `"gradient"`.
        progress: True shows a bar on stderr.

    Returns:
        The rows, costliest first.

    Raises:
        MXError: for other objects or names, without a batch, where a candidate quantizes nothing, for a float model
            whose output cannot be compared, and for gradients where none pass.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> found = pt2mx.sensitivity(exported, [x], ["mxfp4", "mxfp8"], metric="noise", method="both")
        >>> found.of("mxfp8")["0"].alone < found.of("mxfp4")["0"].alone
        True
    """
    model = check_module(model.module() if isinstance(model, ExportedProgram) else model, "model")
    measures, estimated = _check(metric, method, operands)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise MXError(f"draws={draws!r} must be an integer of at least 1")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise MXError(f"seed={seed!r} must be an integer")
    batches = list(several(batches))
    if not batches:
        raise MXError("there is no batch to be sensitive to")
    forms = {name: Form.of(model, config) for name, config in _configs(candidates).items()}
    for name, form in forms.items():
        if not form.modules:
            raise MXError(f"the candidate {name!r} quantizes nothing of the model")
    found: dict[tuple[str, str, str], dict[str, Any]] = defaultdict(dict)
    whole: dict[str, float] = {}
    kinds = [form.observers(module, one) for form in forms.values() for module in form.modules for one in operands]
    if not any(kinds):
        raise MXError(f"the candidates quantize no {' and no '.join(operands)} of any module: give other operands")
    steps = sum(map(bool, kinds)) * measures * (1 + left)
    with torch.no_grad(), tqdm(total=steps + len(batches) * estimated, disable=not progress, leave=False) as bar:
        if measures:
            with unchanged(model):
                wanted = [call(model, batch) for batch in batches]
            own_distance(metric, wanted)
            for name, form in forms.items():
                everything = dict.fromkeys(form.modules, "both")
                whole[name] = _measure(form, everything, batches, wanted, metric)
                for module in form.modules:
                    for which in (one for one in operands if form.observers(module, one)):
                        row = found[module, name, which]
                        row["alone"] = _measure(form, {module: which}, batches, wanted, metric)
                        bar.update()
                        if left:
                            others = {**everything, module: _REST[which]}
                            others = {one: rest for one, rest in others.items() if rest}
                            row["left"] = _measure(form, others, batches, wanted, metric)
                            bar.update()
        if estimated and not callable(metric):
            totals, count, generator = defaultdict[Any, float](float), 0.0, Generator().manual_seed(seed)
            for batch in batches:
                terms, rows = estimates(model, forms, tuple(operands), batch, metric, draws, generator)
                count += rows
                for key, term in terms.items():
                    totals[key] += term
                bar.update()
            if not totals:
                raise MXError("no gradient of an output reaches a module: give method='forward'")
            for key, total in totals.items():
                found[key]["estimate"] = _finite_or_far(total / count)
    made = [SensitivityRow(*key, **numbers) for key, numbers in found.items()]
    made.sort(key=lambda row: -row.cost if not math.isnan(row.cost) else math.inf)
    return Sensitivity(name_of_metric(metric), tuple(made), whole)


#: what is quantized of a module of which these operands are left in float
_REST = {"both": "", "weights": "activations", "activations": "weights"}


def _measure(
    form: Form, modules: Mapping[str, str], batches: Sequence[Any], wanted: Sequence[Any], metric: str | Distance
) -> float:
    """The metric over all batches where these modules are quantized."""
    with form.quantizing(modules) as model, unchanged(model):
        found = mean_distance(metric, ((call(model, batch), want) for batch, want in zip(batches, wanted, strict=True)))
    return _finite_or_far(found)


def _finite_or_far(distance: float) -> float:
    """The distance; outputs that became NaN are as far as can be."""
    return math.inf if math.isnan(distance) else distance


def _check(metric: object, method: object, operands: object) -> tuple[bool, bool]:
    if not isinstance(method, str) or method not in METHODS:
        raise MXError(f"method={method!r} is unknown: {nearest(str(method), METHODS)}")
    measures, estimated = METHODS[method]
    check_metric(metric)
    if estimated and not isinstance(metric, str):
        raise MXError(f"method={method!r} needs one of {', '.join(METRICS)}: a function serves with method='forward'")
    names = operands if isinstance(operands, Sequence) and not isinstance(operands, str) else ()
    if not names or any(name not in OPERANDS for name in names):
        raise MXError(f"operands={operands!r} must be a list of {', '.join(OPERANDS)}")
    return measures, estimated


def _configs(candidates: object) -> dict[str, MXQuantizationConfig]:
    if isinstance(candidates, Mapping):
        named = dict(candidates)
        for name, config in named.items():
            if not isinstance(config, MXQuantizationConfig):
                raise MXError(f"the candidate {name!r} must be an MXQuantizationConfig, not {type(config).__name__}")
    else:
        if not isinstance(candidates, Iterable):
            raise MXError(f"candidates must be formats, or a dict of configs, not {type(candidates).__name__}")
        formats = [candidates] if isinstance(candidates, str) else list(candidates)
        named = {str(one): get_default_mx_quantization_config(weight=one, activation=one) for one in formats}
    if not named:
        raise MXError("there is no candidate: give formats, such as ['mxfp4', 'mxfp8']")
    return named
