"""`suggest_config`: choose formats for a mixed-format quantizer from the statistics of `MXFormatObserver`s."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.fx import GraphModule

from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.flow.observed_modules import ObservedModule, ObservedWeight, observed_modules, sharing_weights
from pt2mx.pt2e.flow.packed_weights import packed_bytes
from pt2mx.pt2e.observe.format_observer import MXFormatObserver
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.observe.torchao_pt2e import is_prepared
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.results import Sensitivity
from pt2mx.spec import MXSpec, parse

#: the noise of a useless format; finite, as the knapsack needs it
_WORST = 1e30
#: most steps into which a budget is divided
_STEPS = 1 << 16


def suggest_config(
    prepared: GraphModule,
    target_bits: float,
    *,
    min_activation_sqnr: float | None = None,
    objective: str = "tensors",
    sensitivity: Sensitivity | None = None,
) -> MXQuantizer:
    """Suggest the quantizer with the least noise whose weights take at most `target_bits` bits per value on average.

    With `objective="tensors"` it minimizes the total noise-to-signal ratio of the weights: the sum of
    10 ** (-SQNR / 10). A linear operator passes this ratio on to its output, so weights of any size and scale count
    alike. The sum ignores that later layers amplify or hide noise. With `objective="output"` it minimizes the sum of
    the modules' costs to the model's output, as measured by `sensitivity`. The minimum within the budget is exact
    (`least_noise`); it does not guarantee model accuracy, so evaluate the result.

    Settings are by module name: the operators of one module, and modules that share a weight, get the same formats.
    Specs of outputs and biases do not change. Weights and activations without an `MXFormatObserver` or without a batch
    also keep their specs; such weights count towards the average.

    Args:
        prepared: a calibrated model that `prepare_pt2e` returned for a config with
            `observer=MXFormatObserver.with_args(...)`.
        target_bits: bits per value, scales and packing included, like `QuantizationReport.weight_bits`.
        min_activation_sqnr: in dB. The activations of each module get the smallest candidate with at least this SQNR
            for all of them; if none has it, the best one, with a warning. None: the activations keep their spec.
        objective: "tensors" or "output".
        sensitivity: the result of `pt2mx.sensitivity`, for "output", with the candidates of the observers and operands
            "weights" (or "both").

    Returns:
        A quantizer for `prepare_pt2e` of the exported model; `to_recipe()` writes it.

    Raises:
        MXError: for a model without format observers or without a batch; for a target below the size of the smallest
            candidates; if operators of one module were prepared with different configs; for "output" without a
            sensitivity, or one that lacks a module or a candidate.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> observer = pt2mx.MXFormatObserver.with_args(candidates=("mxfp4", "mxfp8"))
        >>> config = pt2mx.MXQuantizationConfig(weight="mxfp8", observer=observer)
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
        >>> _ = prepared(x)
        >>> suggested = pt2mx.suggest_config(prepared, target_bits=6.25)  # FP4 takes 4.25, FP8 8.25
        >>> sorted(spec["weight"] for _, spec in suggested.to_dict()["module_name"])
        ['mxfp4_e2m1{32}', 'mxfp8_e4m3{32}']
    """
    _check(prepared, target_bits, min_activation_sqnr)
    if objective not in ("tensors", "output"):
        raise MXError(f"objective={objective!r} is unknown: {nearest(str(objective), ('tensors', 'output'))}")
    if (objective == "output") != isinstance(sensitivity, Sensitivity):
        raise MXError("objective='output' and sensitivity=pt2mx.sensitivity(...) go together: give both or neither")
    modules = observed_modules(prepared)
    weights = _choose_weights(modules, target_bits, sensitivity)
    quantizer, poor = MXQuantizer(), []
    for name, module in sorted(modules.items(), key=lambda item: item[0]):
        if module.config is None:
            if _is_covered(name, modules):
                quantizer.set_module_name(name, None)
            continue
        chosen = {"weight": weights[name]} if name in weights else {}
        best = None if min_activation_sqnr is None else _choose_activation(module, min_activation_sqnr)
        if best is not None:
            chosen["activation"], reached = best
            if not reached:
                poor.append(name)
        config = _with_specs(module.config, chosen, module.roles)
        if name:
            quantizer.set_module_name(name, config)
        else:
            quantizer.set_global(config)
    if poor:
        warnings.warn(
            f"no candidate has an SQNR of {min_activation_sqnr} dB for the activations of {', '.join(poor)}: they get "
            "the one with the highest",
            stacklevel=2,
        )
    return quantizer


def _check(prepared: object, target_bits: object, min_activation_sqnr: object) -> None:
    if not isinstance(prepared, GraphModule) or not is_prepared(prepared):
        raise MXError(f"expected a prepared model, not {type(prepared).__name__}: pass what prepare_pt2e returned")
    for name, value in (("target_bits", target_bits), ("min_activation_sqnr", min_activation_sqnr)):
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number and not (value is None and name == "min_activation_sqnr"):
            raise MXError(f"{name}={value!r} must be a finite number")
    observers = [m for m in prepared.modules() if isinstance(m, MXFormatObserver)]
    if not observers:
        raise MXError(
            "the model was prepared without format observers: give the config "
            "observer=MXFormatObserver.with_args(candidates=...) and prepare it again"
        )
    if not any(observer.candidate_statistics for observer in observers):
        raise MXError("the model has seen no batch: run calibration batches through it first")


def _with_specs(config: MXQuantizationConfig, chosen: dict[str, MXSpec], roles: dict[str, str]) -> MXQuantizationConfig:
    """Return a module's config with the specs that were `chosen` by role, also for single operands.

    `roles`: the roles of the module's operands.
    """
    operands = []
    for name, spec in config.operands:
        if name in roles and (spec is None or roles[name] not in chosen):
            operands.append((name, spec))
    weight, activation = chosen.get("weight", config.weight), chosen.get("activation", config.activation)
    return replace(config, operands=tuple(operands), weight=weight, activation=activation)


def _choose_weights(
    modules: dict[str, ObservedModule], target_bits: float, sensitivity: Sensitivity | None
) -> dict[str, MXSpec]:
    """Return module name -> spec of its weights, for modules whose weights have candidates."""
    groups = sharing_weights(modules)
    specs: list[list[str | None]] = []  # the candidates of each group
    items: list[list[Option]] = []
    shapes: dict[Any, tuple[int, ...]] = {}
    for names in groups:
        weights: list[ObservedWeight] = []
        for name in names:
            weights += modules[name].weights
        shapes |= {weight.source: tuple(weight.shape) for weight in weights}
        options = _options(weights)
        if sensitivity is not None:
            options = _by_output(names, options, sensitivity)
        specs.append(list(options))
        items.append(list(options.values()))
    values = sum(map(math.prod, shapes.values()))
    budget = math.floor(target_bits * values / 8 + 1e-6)  # a target computed from bytes must give these bytes
    chosen = least_noise(items, budget)
    if chosen is None:
        sizes = [[option.bytes for option in options] for options in items]
        least = 8 * sum(map(min, sizes)) / values
        most = 8 * sum(map(max, sizes)) / values
        raise MXError(
            f"target_bits={target_bits} is below the smallest candidates: the weights can take {least:.4g} to "
            f"{most:.4g} bits a value, scales and packing counted; raise the target or add a smaller candidate"
        )
    by_module: dict[str, MXSpec] = {}
    for names, candidates, number in zip(groups, specs, chosen, strict=True):
        spec = candidates[number]
        if spec is not None:
            by_module |= dict.fromkeys(names, parse(spec))
    return by_module


def _options(weights: list[ObservedWeight]) -> dict[str | None, Option]:
    """Return the cost of each candidate that all weights of a group have; None means their present specs.

    A tensor is stored once for each block axis, however many operators use it.
    """
    seen = _seen(weight.observer for weight in weights)
    common = _common(seen)
    if not common:
        kept = {(w.source, w.observer.spec): w.shape for w in weights}
        return {None: Option(sum(packed_bytes(shape, spec) for (_, spec), shape in kept.items()), 0.0)}
    stored = {(w.source, w.observer.spec.axis): (w.shape, s) for w, s in zip(weights, seen, strict=True)}
    options: dict[str | None, Option] = {}
    for name in common:
        size, noise = 0, 0.0
        for (_, axis), (shape, statistics) in stored.items():
            size += packed_bytes(shape, parse(name, axis=axis))
            noise += _noise(statistics[name])
        options[name] = Option(size, noise)
    return options


def _seen(observers: Iterable[MXObserver]) -> list[dict[str, QuantizationStatistics]]:
    """Return the statistics of the candidates of each observer, which only an `MXFormatObserver` has."""
    return [one.candidate_statistics if isinstance(one, MXFormatObserver) else {} for one in observers]


def _common(seen: list[dict[str, QuantizationStatistics]]) -> list[str]:
    """Return the candidates that all have."""
    return [name for name in seen[0] if all(name in statistics for statistics in seen)] if seen else []


def _by_output(
    modules: list[str], options: dict[str | None, Option], sensitivity: Sensitivity
) -> dict[str | None, Option]:
    """Return the options of modules that share weights, with their cost to the model's output as noise."""
    costs: dict[tuple[str, str], float] = {}
    for row in sorted(sensitivity.rows, key=lambda row: row.operands):  # "weights" overrides "both"
        if row.operands != "activations":
            costs[row.module, _format_named(row.candidate)] = row.cost
    by_spec = dict(options)
    for spec, option in options.items():
        if spec is None:
            continue
        cost = 0.0
        for name in modules:
            cost += costs.get((name, spec), math.nan)
            if math.isnan(cost):
                raise MXError(
                    f"the sensitivity has nothing of the weights of {name!r} in {spec}: measure the candidates of "
                    "the observers, with operands=['weights']"
                )
        by_spec[spec] = replace(option, noise=min(max(cost, 0.0), _WORST))
    return by_spec


def _format_named(candidate: str) -> str:
    """Return the spec of a candidate of a sensitivity."""
    try:
        return str(parse(candidate))
    except MXError:
        raise MXError(
            f"the sensitivity has the candidate {candidate!r}, which is no format: measure the candidates of the "
            "observers, by their names"
        ) from None


def _noise(seen: QuantizationStatistics) -> float:
    """Return the relative noise: 0 without finite values, and finite for a useless format."""
    return 0.0 if math.isnan(seen.sqnr) else min(seen.relative_noise, _WORST)


def _choose_activation(module: ObservedModule, least: float) -> tuple[MXSpec, bool] | None:
    """Return the spec of a module's activations, and whether its SQNR reaches `least`; None without candidates."""
    seen = [statistics for statistics in _seen(module.activations) if statistics]
    sqnr: dict[str, float] = {}
    for name in _common(seen):
        known = [statistics[name].sqnr for statistics in seen if not math.isnan(statistics[name].sqnr)]
        sqnr[name] = min(known, default=math.inf)
    if not sqnr:
        return None
    enough = [name for name in sqnr if sqnr[name] >= least]
    if enough:
        return parse(min(enough, key=lambda name: (parse(name).effective_bits, -sqnr[name]))), True
    return parse(max(sqnr, key=sqnr.__getitem__)), False


def _is_covered(name: str, modules: dict[str, ObservedModule]) -> bool:
    """Return True if the setting of an enclosing module would quantize the operators of this one."""
    return any(m.config is not None and f"{name}.".startswith(f"{n}." if n else "") for n, m in modules.items())


@dataclass(frozen=True)
class Option:
    """The bytes of an item in one format, and its noise (finite)."""

    bytes: int
    noise: float


def least_noise(items: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Solve the multiple-choice knapsack: return the index of one option per item, with the least total noise and at
    most `budget` bytes; None if even the smallest options take more.

    Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems" (2004), chapter 11. Dynamic programming over the bytes
    beyond the smallest options, in units of their greatest common divisor, is exact. For more than 65,536 steps, the
    units are larger and costs round up to them: the choice stays within the budget, and leaves at most a 65,536th of it
    per item unused.
    """
    floors = [min(option.bytes for option in options) for options in items]
    spare = budget - sum(floors)
    if spare < 0:
        return None
    extras = [[option.bytes - floor for option in options] for options, floor in zip(items, floors, strict=True)]
    spare = min(spare, sum(map(max, extras)))
    unit = max(math.gcd(*(extra for row in extras for extra in row)), -(-spare // _STEPS), 1)
    steps = spare // unit
    least = np.zeros(steps + 1)  # least noise of the items so far, for each budget
    choices = []
    for options, row in zip(items, extras, strict=True):
        totals = np.full((len(options), steps + 1), np.inf)
        costs = [-(-extra // unit) for extra in row]
        for total, option, cost in zip(totals, options, costs, strict=True):
            if cost <= steps:
                total[cost:] = least[: steps + 1 - cost] + option.noise
        choices.append((totals.argmin(0).astype(np.int16), costs))
        least = totals.min(0)
    chosen, left = [], steps
    for best, costs in reversed(choices):
        chosen.append(int(best[left]))
        left -= costs[chosen[-1]]
    return chosen[::-1]
