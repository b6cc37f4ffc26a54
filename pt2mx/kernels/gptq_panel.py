"""The definition of a panel of GPTQ: columns that are rounded one after the other, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from pt2mx.kernels import elements
from pt2mx.spec import MXSpec


def round_panel(columns: Tensor, factor: Tensor, scale: Tensor, spec: MXSpec, *bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Round each column of a panel, and subtract its error from the later ones.

    Args:
        columns: (groups, width, N) float32, the weight: a column is a row in memory.
        factor: (groups, width, width) float32, upper triangular. Row i has the share of column i's error that each
            later column makes up for.
        scale: (groups, width, N) float32, what multiplies the element of each value.
        spec: its element and rounding.
        bounds: (groups, width, N) twice, the smallest and the largest value to which each is rounded; or nothing.

    Returns:
        (groups, width, N) twice: the rounded values, and the errors over the diagonal of `factor`.
    """
    columns, shares, inverse = columns.clone(), factor.unsqueeze(3), scale.reciprocal()
    rounded, errors = torch.empty_like(columns), torch.empty_like(columns)
    for i in range(columns.shape[1]):
        w = columns[:, i]
        inside = w.clamp(*(bound[:, i] for bound in bounds)) if bounds else w
        value = elements.round_to_element(inside * inverse[:, i], spec.element, spec.rounding)
        torch.mul(value, scale[:, i], out=rounded[:, i])
        error = torch.sub(w, rounded[:, i], out=errors[:, i]).div_(shares[:, i, i])
        columns[:, i + 1 :].addcmul_(shares[:, i, i + 1 :], error.unsqueeze(1), value=-1)
    return rounded, errors
