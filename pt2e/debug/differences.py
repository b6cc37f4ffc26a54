"""The difference of two tensors, in sums over batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2mx.analysis.sums import sqnr_db


@dataclass
class Difference:
    """The distance of values from those of a reference, over all batches that were added.

    Left out are values that are NaN or Inf in the reference (a masked score).
    """

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    energy: float = 0.0
    max: float = 0.0
    values: int = 0

    def add(self, got: Tensor, want: Tensor) -> None:
        """Count one more pair of tensors of one shape."""
        finite = want.isfinite()
        got, want = got[finite].double(), want[finite].double()
        if not want.numel():
            return
        self.signal += want.square().sum().item()
        self.noise += (got - want).square().sum().item()
        self.product += (got * want).sum().item()
        self.energy += got.square().sum().item()
        self.max = max(self.max, (got - want).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item())
        self.values += want.numel()

    @property
    def sqnr(self) -> float:
        """In dB; Inf where nothing differs, NaN where nothing was compared."""
        if not self.values:
            return math.nan
        return sqnr_db(self.signal, math.inf if math.isnan(self.noise) else self.noise)

    @property
    def cosine(self) -> float:
        """The cosine of the two vectors of all values."""
        scale = math.sqrt(self.signal * self.energy)
        return self.product / scale if scale else float(self.signal == self.energy)


def comparable(got: object, want: object) -> bool:
    """True of two floating tensors of one shape."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return False
    return got.shape == want.shape and got.is_floating_point() and want.is_floating_point()


def relative_error(got: Any, want: Any) -> float:
    """Give the largest norm of a difference of two outputs over the norm of the second.

    Args:
        got: a tensor, or a tree of them.
        want: another one of that form.

    Returns:
        The error, 0 where nothing floating is in them; Inf where a number of tensors, a shape, a NaN or an Inf differs.
    """
    pairs = list(zip(_tensors(got), _tensors(want), strict=False))
    errors = [0.0 if len(pairs) == len(_tensors(got)) == len(_tensors(want)) else math.inf]
    for one, other in pairs:
        if not comparable(one, other):
            errors.append(math.inf if one.shape != other.shape else 0.0)
            continue
        finite = other.isfinite()
        rest, other_rest = one[~finite].double(), other[~finite].double()
        if not torch.allclose(rest, other_rest, rtol=0, atol=0, equal_nan=True):
            errors.append(math.inf)
            continue
        distance = (one[finite].double() - other[finite].double()).norm().item()
        scale = other[finite].double().norm().item()
        errors.append(math.inf if math.isnan(distance) else distance / scale if scale else math.inf * bool(distance))
    return max(0.0 if math.isnan(error) else error for error in errors)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
