"""Distances of a model's outputs from those of the float model, and directions in which their curvature is sampled.

A distance d(y + e, y) that is 0 at e = 0 is e' H e / 2 for small e. A direction v is random with E[v v'] = H, so that
the mean of (v' e)^2 / 2 is that distance: for the divergence of predicted distributions H is Fisher's information, and
v the difference of a label drawn from the prediction and the prediction itself (Martens, 2014, arXiv:1412.1193).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError


class Metric(NamedTuple):
    """A distance of outputs, as a sum over rows (the last dimension) and what it is divided by, and its directions."""

    distance: Callable[[Tensor, Tensor], tuple[float, float]]
    direction: Callable[[Tensor, Generator], Tensor]
    meaning: str


def _divergence(got: Tensor, want: Tensor) -> tuple[float, float]:
    of_got, of_want = (F.log_softmax(y.double(), -1) for y in (got, want))
    return (of_want.exp() * (of_want - of_got)).sum().item(), want.numel() / want.shape[-1]


def _label(want: Tensor, generator: Generator) -> Tensor:
    chances = want.softmax(-1)
    labels = torch.multinomial(chances.flatten(0, -2), 1, generator=generator).reshape(want.shape[:-1])
    return F.one_hot(labels, want.shape[-1]).to(want.dtype) - chances


def _one_minus_cosine(got: Tensor, want: Tensor) -> tuple[float, float]:
    return (1 - F.cosine_similarity(got.double(), want.double(), dim=-1)).sum().item(), want.numel() / want.shape[-1]


def _across(want: Tensor, generator: Generator) -> Tensor:
    unit, signs = F.normalize(want, dim=-1), _signs(want, generator)
    return (signs - (signs * unit).sum(-1, keepdim=True) * unit) / want.norm(dim=-1, keepdim=True)


def _noise(got: Tensor, want: Tensor) -> tuple[float, float]:
    return (got.double() - want.double()).square().sum().item(), want.double().square().sum().item()


def _any_way(want: Tensor, generator: Generator) -> Tensor:
    return math.sqrt(2) * _signs(want, generator)


def _signs(like: Tensor, generator: Generator) -> Tensor:
    return torch.randint(2, like.shape, generator=generator).to(like) * 2 - 1


METRICS = {
    "kl": Metric(_divergence, _label, "divergence of the distributions that logits predict, in nats"),
    "cosine": Metric(_one_minus_cosine, _across, "one minus the cosine of embeddings"),
    "noise": Metric(_noise, _any_way, "power of the error over that of the output"),
}


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
