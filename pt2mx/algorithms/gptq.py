"""GPTQ: a weight is rounded column by column, and the columns to come make up for each error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(arXiv:2210.17323). Columns go by falling energy of their input ("act-order"); blocks of the format stay where they are,
for their scales are chosen beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.algorithms.scales import block_exponents, check_exponents, check_matrix, scales_of_values
from pt2mx.errors import MXError
from pt2mx.kernels import elements
from pt2mx.kernels.select import run_step
from pt2mx.spec import MXSpec

#: columns whose errors one matmul subtracts from the later columns
_PANEL = 128
#: the smallest damping: the inverse of a Hessian of few inputs stays within fp32
_LEAST_DAMPING = 1e-6


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    spec: MXSpec,
    *,
    exponents: Tensor | None = None,
    scales: Tensor | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
    line: int | None = None,
    damping: float = 0.01,
    act_order: bool = True,
) -> Tensor:
    """Round a weight so that its matmul with the inputs of that Hessian changes little.

    It lowers `trace((W - Q) H (W - Q)^T)`, the squared error of `x @ W.T` over the inputs x.

    Args:
        weight: (N, K) float.
        hessian: (K, K) float32, the sum of `x.T @ x` over the inputs, or any multiple of it. A column without input
            (zero on the diagonal) is rounded to nearest.
        spec: the format; blocks run along K. Its axis has no meaning here.
        exponents: (N, blocks) int32, the scales; None: the scales of the spec's scale mode.
        scales: (N, K) float32 instead of exponents, what multiplies the element of each value
            (`pt2mx.algorithms.block_scales`).
        bounds: (N, K) each, the smallest and the largest value to which each weight is rounded; None: any value.
        line: columns after which a new block starts; None: K.
        damping: added to the diagonal, times its mean; at least 0.
        act_order: True processes the columns by decreasing diagonal, False from left to right.

    Returns:
        (N, K) float32 values on the MX grid: quantizing them again, in any scale mode except "ceil", changes nothing,
        except 240 times the scale in FP8 E4M3 where that is the largest value of a block.

    Raises:
        MXError: for shapes that do not match, exponents beyond +-126, a random rounding, a negative damping,
            and a Hessian that is not finite or far from positive semidefinite.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.algorithms import gptq
        >>> weight, x = torch.tensor([[0.3, 0.3]]), torch.tensor([[1.0, 1.0]])  # x has no other direction
        >>> spec = pt2mx.MXSpec("int3", 2)
        >>> pt2mx.fake_quantize_mx(weight, spec), gptq(weight, x.T @ x, spec)
        (tensor([[0.2500, 0.2500]]), tensor([[0.2500, 0.3750]]))
    """
    check_matrix(weight)
    _check(weight.shape[1], hessian, spec, damping)
    if scales is None:
        exponents = block_exponents(weight, spec, line=line) if exponents is None else exponents
        check_exponents(exponents, weight, spec, line)
        scales = scales_of_values(exponents, weight.shape[1], spec, line)
    dampings = torch.tensor([damping], device=weight.device)
    ends = [] if bounds is None else [bound[None] for bound in bounds]
    return gptq_of_groups(weight[None], hessian[None], spec, scales[None], dampings, act_order, ends)[0]


@torch.no_grad()
def gptq_of_groups(
    weights: Tensor,
    hessians: Tensor,
    spec: MXSpec,
    scales: Tensor,
    damping: Tensor,
    act_order: bool = True,
    bounds: Sequence[Tensor] = (),
) -> Tensor:
    """Round many matrices at once, each as `gptq` does: a depthwise convolution has hundreds of small ones.

    Args:
        weights: (groups, N, K) float.
        hessians: (groups, K, K) float32.
        spec, act_order: as there.
        scales: (groups, N, K) float32, what multiplies the element of each value.
        damping: (groups,) float32.
        bounds: as there, (groups, N, K) each; empty: any value.

    Returns:
        (groups, N, K) float32.

    Raises:
        MXError: for a Hessian that is far from positive semidefinite.
    """
    groups, _, k = weights.shape
    columns = weights.float().mT.contiguous()  # (groups, K, N): a column is a row in memory
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    dead = diagonal <= 0
    peak = torch.where(dead.all(1), 1.0, diagonal.amax(1))
    hessians = hessians.float() / peak[:, None, None]
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    mean = torch.where(dead, 0, diagonal).sum(1) / (~dead).sum(1)
    mean = torch.where(dead.all(1), 1.0, mean)
    diagonal.copy_(torch.where(dead, mean[:, None], diagonal))
    order = torch.arange(k, device=weights.device).expand(groups, k)
    if act_order:
        order = diagonal.argsort(dim=1, descending=True, stable=True)
    each = torch.arange(groups, device=weights.device)[:, None]
    ends = [bound.mT for bound in bounds]
    # rows first, then columns: both at once take three times as long
    ordered = hessians[each, order].gather(2, order[:, None].expand_as(hessians))
    scale = scales.mT
    factor = _inverse_factor(ordered, damping)  # (groups, K, K) upper
    rounded = _round_columns(columns[each, order], factor, scale[each, order], spec, [end[each, order] for end in ends])
    result = torch.empty_like(columns)
    result[each, order] = rounded
    inside = columns[dead]
    if ends:
        inside = inside.clamp(*(end[dead] for end in ends))
    result[dead] = elements.round_to_element(inside / scale[dead], spec.element, spec.rounding) * scale[dead]
    return result.mT.contiguous()


def _round_columns(columns: Tensor, factor: Tensor, scale: Tensor, spec: MXSpec, ends: list[Tensor]) -> Tensor:
    """columns: (groups, K, N), changed; factor: (groups, K, K) upper; scale, ends: (groups, K, N) -> (groups, K, N)
    values of the format."""
    rounded, k = torch.empty_like(columns), columns.shape[1]
    for first in range(0, k, _PANEL):
        panel = slice(first, min(first + _PANEL, k))
        later = slice(panel.stop, k)
        multipliers, *bounds = (tensor[:, panel] for tensor in (scale, *ends))
        args = columns[:, panel], factor[:, panel, panel], multipliers, spec, *bounds
        rounded[:, panel], errors = run_step("gptq_panel", *args)
        columns[:, later].baddbmm_(factor[:, panel, later].mT, errors, alpha=-1)
    return rounded


def _inverse_factor(hessians: Tensor, damping: Tensor) -> Tensor:
    """The upper Cholesky factors of the inverses of damped Hessians, (groups, K, K): row i has the share of an error in
    column i that each column behind it makes up for."""
    added = hessians.diagonal(dim1=1, dim2=2).mean(1) * damping.clamp(min=_LEAST_DAMPING)
    identity = torch.eye(hessians.shape[1], device=hessians.device).expand_as(hessians)
    for _ in range(4):
        damped = hessians.flip(1, 2)
        damped.diagonal(dim1=1, dim2=2).add_(added[:, None])
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.any():
            # H = U U^T for the flipped factor U, so that U^-1 is the upper factor of the inverse of H
            return torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True)
        added = torch.where(failed != 0, 10 * added, added)
    raise MXError(
        "the Hessian is far from positive semidefinite: it must be a sum of x.T @ x over inputs, with more damping "
        f"than {float(damping.max()):g} where they are few"
    )


def _check(k: int, hessian: Tensor, spec: MXSpec, damping: float) -> None:
    if hessian.shape != (k, k):
        raise MXError(f"the Hessian of a weight of {k} columns must be ({k}, {k}), not {tuple(hessian.shape)}")
    if spec.rounding == "stochastic":
        raise MXError("GPTQ rounds to nearest: give a spec without stochastic rounding")
    if not damping >= 0:
        raise MXError(f"damping={damping} must be at least 0")
    if not hessian.isfinite().all():
        raise MXError("the Hessian holds an Inf or a NaN: the inputs of the calibration do, or their squares overflow")
