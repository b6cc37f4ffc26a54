"""Distances of a model's outputs from those of the float model, and directions in which their curvature is sampled.

A distance d(y + e, y) that is 0 at e = 0 is e' H e / 2 for small e. A direction v is random with E[v v'] = H, so that
the mean of (v' e)^2 / 2 is that distance: for the divergence of predicted distributions H is Fisher's information, and
v the difference of a label drawn from the prediction and the prediction itself (Martens, 2014, arXiv:1412.1193).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pt2mx.analysis.divergence import kl_divergence
from pt2mx.errors import MXError, nearest

#: a user's metric: (outputs, those of the float model) -> a number, smaller for a better model
Distance = Callable[[Any, Any], float]


class Quality(NamedTuple):
    """The form in which a distance is read: its name, the number of a distance, and its better end."""

    name: str
    of: Callable[[float], float]
    larger_is_better: bool


class Metric(NamedTuple):
    """A distance of outputs, as a sum over rows (the last dimension) and what it is divided by, its directions, and the
    form in which it is read."""

    distance: Callable[[Tensor, Tensor], tuple[float, float]]
    direction: Callable[[Tensor, Generator], Tensor]
    quality: Quality


def _divergence(got: Tensor, want: Tensor) -> tuple[float, float]:
    log_got, log_want = (F.log_softmax(y.double(), -1) for y in (got, want))
    return kl_divergence(log_want, log_got).sum().item(), math.prod(want.shape[:-1])


def _label(want: Tensor, generator: Generator) -> Tensor:
    chances = want.softmax(-1)
    labels = torch.multinomial(chances.reshape(-1, want.shape[-1]), 1, generator=generator).reshape(want.shape[:-1])
    return F.one_hot(labels, want.shape[-1]).to(want.dtype) - chances


def _one_minus_cosine(got: Tensor, want: Tensor) -> tuple[float, float]:
    rows = want.any(-1)  # one of zeros has no direction
    return (1 - F.cosine_similarity(got[rows].double(), want[rows].double(), dim=-1)).sum().item(), rows.sum().item()


def _across(want: Tensor, generator: Generator) -> Tensor:
    unit, signs = F.normalize(want, dim=-1), _signs(want, generator)
    across = (signs - (signs * unit).sum(-1, keepdim=True) * unit) / want.norm(dim=-1, keepdim=True)
    return across.where(want.any(-1, keepdim=True), 0)


def _noise(got: Tensor, want: Tensor) -> tuple[float, float]:
    return (got.double() - want.double()).square().sum().item(), want.double().square().sum().item()


def _any_way(want: Tensor, generator: Generator) -> Tensor:
    return math.sqrt(2) * _signs(want, generator)


def _signs(like: Tensor, generator: Generator) -> Tensor:
    return torch.randint(2, like.shape, generator=generator).to(like) * 2 - 1


def _decibels(noise: float) -> float:
    return -10 * math.log10(noise) if noise else math.inf


#: largest distance of outputs from themselves, by rounding
_EQUAL = 1e-3
METRICS = {
    "kl": Metric(_divergence, _label, Quality("divergence, nats", lambda distance: distance, False)),
    "cosine": Metric(_one_minus_cosine, _across, Quality("cosine", lambda distance: 1 - distance, True)),
    "noise": Metric(_noise, _any_way, Quality("SQNR, dB", _decibels, True)),
}


def check_metric(metric: object) -> None:
    """`MXError` for what is neither the name of a metric nor a function."""
    if isinstance(metric, str):
        if metric not in METRICS:
            raise MXError(f"metric={metric!r} is unknown: {nearest(metric, METRICS)}")
    elif not callable(metric):
        raise MXError(f"metric must be one of {', '.join(METRICS)}, or a function, not {type(metric).__name__}")


def name_of_metric(metric: str | Distance) -> str:
    """The name of a metric, that of a function too."""
    return metric if isinstance(metric, str) else str(getattr(metric, "__name__", type(metric).__name__))


def mean_distance(metric: str | Distance, pairs: Iterable[tuple[Any, Any]]) -> float:
    """The metric over all (outputs of a batch, those of the float model); NaN where there is none."""
    totals, counts = 0.0, 0.0
    for got, want in pairs:
        if callable(metric):
            total, count = number_of(metric(got, want), "the metric", "smaller"), 1.0
        else:
            total, count = distance_over(METRICS[metric], outputs_of(got), outputs_of(want))
        totals, counts = totals + total, counts + count
    return totals / counts if counts else math.nan


def own_distance(metric: str | Distance, wanted: Iterable[Any]) -> float:
    """The metric of the float model's outputs, one for each batch, and themselves: 0 but for a user's loss.

    Raises:
        MXError: where they cannot be compared.
    """
    own = mean_distance(metric, ((want, want) for want in wanted))
    if not isinstance(metric, str) and not math.isfinite(own):
        raise MXError(
            f"the metric {name_of_metric(metric)} gives {own} for the float model: it must give a finite number"
        )
    if not math.isfinite(own) or (isinstance(metric, str) and abs(own) > _EQUAL):
        raise MXError(
            "the float model's outputs hold NaN or Inf, no value, or zeros alone: there is nothing to compare with by "
            f"{name_of_metric(metric)!r}"
        )
    return 0.0 if isinstance(metric, str) else own


def number_of(value: object, source: str, better: str) -> float:
    """The number that a user's function gave, of any library.

    Args:
        value: a number, or a tensor or an array of one.
        source: the function, as the error names it.
        better: "smaller" or "larger": the number of a better model.

    Raises:
        MXError: for anything else.
    """
    try:
        found = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # of several values
        found = None
    if isinstance(found, bool) or not isinstance(found, int | float):
        shape = getattr(value, "shape", None)
        given = repr(value) if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"
        raise MXError(f"{source} gave {given}: it must give a number, {better} for a better model")
    return float(found)


def outputs_of(tree: Any) -> list[Tensor]:
    """The floating tensors of a model's output, of at least one dimension.

    Raises:
        MXError: where there is none.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        raise MXError("the model gives no floating tensor: there is nothing to be sensitive")
    return [torch.atleast_1d(leaf) for leaf in leaves]


def distance_over(metric: Metric, got: list[Tensor], want: list[Tensor]) -> tuple[float, float]:
    """The distance of all outputs: its sum, and what that is divided by."""
    pairs = [metric.distance(one, other) for one, other in zip(got, want, strict=True)]
    return sum(total for total, _ in pairs), sum(count for _, count in pairs)
