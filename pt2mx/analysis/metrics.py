"""Distances of a model's outputs from the float model's outputs, and random directions of their curvature.

A distance d(y + e, y) that is 0 at e = 0 equals e' H e / 2 for small e. A direction v is random with E[v v'] = H, so
that the mean of (v' e)^2 / 2 is that distance. For the divergence of predicted distributions, H is the Fisher
information, and v is a label drawn from the prediction minus the prediction (Martens, 2014, arXiv:1412.1193).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from pt2mx.analysis.agreement import tensors_in
from pt2mx.errors import MXError, nearest

#: a user's metric: (outputs, outputs of the float model) -> a number, smaller for a better model
Distance = Callable[[Any, Any], float]


class Quality(NamedTuple):
    """The presentation of a distance: its name, the conversion of the number, which end is better, and what is good
    enough for most uses (None: not known)."""

    name: str
    from_distance: Callable[[float], float]
    larger_is_better: bool
    enough: float | None = None


class Metric(NamedTuple):
    """A distance of outputs.

    Args:
        distance: (outputs, references) -> the sum over rows (the last dimension), and its divisor.
        direction: (references, generator) -> a random direction of the curvature.
        quality: how the distance is shown.
    """

    distance: Callable[[Tensor, Tensor], tuple[float, float]]
    direction: Callable[[Tensor, Generator], Tensor]
    quality: Quality


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the divergence of q from p, the sum of p (log p - log q), in nats.

    An outcome with probability 0 in p (a masked logit: log p = -inf) adds nothing, even if q gives it 0 too. An outcome
    with probability 0 in q alone makes the divergence Inf.

    Args:
        log_p, log_q: (..., n), logarithms of probabilities that sum to 1 along the last dimension.

    Returns:
        (...,), NaN if either contains NaN.
    """
    p = log_p.exp()
    return torch.where((p == 0) & ~log_q.isnan(), 0, p * (log_p - log_q)).sum(-1)


def _divergence(output: Tensor, reference: Tensor) -> tuple[float, float]:
    log_output, log_reference = (F.log_softmax(y.double(), -1) for y in (output, reference))
    return kl_divergence(log_reference, log_output).sum().item(), math.prod(reference.shape[:-1])


def _label_minus_prediction(reference: Tensor, generator: Generator) -> Tensor:
    chances = reference.softmax(-1)
    drawn = torch.multinomial(chances.reshape(-1, reference.shape[-1]), 1, generator=generator)
    labels = drawn.reshape(reference.shape[:-1])
    return F.one_hot(labels, reference.shape[-1]).to(reference.dtype) - chances


def _one_minus_cosine(output: Tensor, reference: Tensor) -> tuple[float, float]:
    rows = reference.any(-1)  # a row of zeros has no direction
    cosines = F.cosine_similarity(output[rows].double(), reference[rows].double(), dim=-1)
    return (1 - cosines).sum().item(), rows.sum().item()


def _orthogonal_signs(reference: Tensor, generator: Generator) -> Tensor:
    unit = F.normalize(reference, dim=-1)
    signs = _signs(reference, generator)
    across = signs - (signs * unit).sum(-1, keepdim=True) * unit
    return (across / reference.norm(dim=-1, keepdim=True)).where(reference.any(-1, keepdim=True), 0)


def _noise(output: Tensor, reference: Tensor) -> tuple[float, float]:
    return (output.double() - reference.double()).square().sum().item(), reference.double().square().sum().item()


def _scaled_signs(reference: Tensor, generator: Generator) -> Tensor:
    return math.sqrt(2) * _signs(reference, generator)


def _signs(like: Tensor, generator: Generator) -> Tensor:
    return torch.randint(2, like.shape, generator=generator).to(like) * 2 - 1


def _decibels(noise: float) -> float:
    return -10 * math.log10(noise) if noise else math.inf


#: largest distance of outputs from themselves, due to rounding
_EQUAL = 1e-3
METRICS = {
    "kl": Metric(
        _divergence, _label_minus_prediction, Quality("divergence, nats", lambda distance: distance, False, 0.05)
    ),
    "cosine": Metric(
        _one_minus_cosine, _orthogonal_signs, Quality("cosine", lambda distance: 1 - distance, True, 0.99)
    ),
    "noise": Metric(_noise, _scaled_signs, Quality("SQNR, dB", _decibels, True, 20.0)),
}


def check_metric(metric: object) -> None:
    """Raise an `MXError` unless `metric` is the name of a metric or a function."""
    if isinstance(metric, str):
        if metric not in METRICS:
            raise MXError(f"metric={metric!r} is unknown: {nearest(metric, METRICS)}")
    elif not callable(metric):
        raise MXError(f"metric must be one of {', '.join(METRICS)}, or a function, not {type(metric).__name__}")


def name_of_metric(metric: str | Distance) -> str:
    """Return the name of a metric or function."""
    return metric if isinstance(metric, str) else str(getattr(metric, "__name__", type(metric).__name__))


def mean_distance(metric: str | Distance, pairs: Iterable[tuple[Any, Any]]) -> float:
    """Return the metric over all pairs of (outputs of a batch, outputs of the float model); NaN without pairs."""
    total, count = sum_of_pairs([batch_distance(metric, *pair) for pair in pairs])
    return total / count if count else math.nan


def batch_distance(metric: str | Distance, output: Any, reference: Any) -> tuple[float, float]:
    """Return the metric over a batch: its sum, and the divisor."""
    if callable(metric):
        return number_of(metric(output, reference), "the metric", "smaller"), 1.0
    return distance_over(METRICS[metric], outputs_of(output), outputs_of(reference))


def own_distance(metric: str | Distance, references: Iterable[Any]) -> float:
    """Return the distance of the float model's outputs from themselves: 0, except for a user's loss.

    Raises:
        MXError: for outputs that cannot be compared.
    """
    distance = mean_distance(metric, ((reference, reference) for reference in references))
    if not isinstance(metric, str):
        if not math.isfinite(distance):
            raise MXError(
                f"the metric {name_of_metric(metric)} gives {distance} for the float model: it must give a finite "
                "number"
            )
        return distance
    if not abs(distance) <= _EQUAL:  # also NaN
        raise MXError(
            "the float model's outputs hold NaN or Inf, no value, or zeros alone: there is nothing to compare with by "
            f"{metric!r}"
        )
    return 0.0


def number_of(value: object, source: str, better: str) -> float:
    """Return the number that a user's function returned, in the type of any library.

    An error names the function (`source`), and says whether "smaller" or "larger" means a better model.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # several values
        number = None
    if isinstance(number, bool) or not isinstance(number, int | float):
        shape = getattr(value, "shape", None)
        text = repr(value) if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"
        raise MXError(f"{source} gave {text}: it must give a number, {better} for a better model")
    return float(number)


def outputs_of(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output, with at least one dimension."""
    outputs = [torch.atleast_1d(tensor) for tensor in tensors_in(tree) if tensor.is_floating_point()]
    if not outputs:
        raise MXError("the model gives no floating tensor: there is nothing to be sensitive")
    return outputs


def distance_over(metric: Metric, outputs: list[Tensor], references: list[Tensor]) -> tuple[float, float]:
    """Return the distance over all outputs: its sum, and the divisor."""
    pairs = zip(outputs, references, strict=True)
    return sum_of_pairs(metric.distance(*pair) for pair in pairs)


def sum_of_pairs(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Add up distances, each a sum and its divisor."""
    total, count = 0.0, 0.0
    for one_total, one_count in pairs:
        total += one_total
        count += one_count
    return total, count
