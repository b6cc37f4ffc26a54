"""GPTQ: a weight is rounded column by column, and the columns to come make up for each error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(arXiv:2210.17323). Columns go by falling energy of their input ("act-order"); blocks of the format stay where they are,
for their scales are chosen beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pt2mx.algorithms.scales import (
    block_exponents,
    block_of_column,
    check_exponents,
    check_matrix,
    pow2,
)
from pt2mx.errors import MXError
from pt2mx.kernels import elements
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
    k = weight.shape[1]
    _check(k, hessian, spec, damping)
    columns = weight.float().t().contiguous()  # (K, N): a column is a row in memory
    dead = hessian.diagonal() <= 0
    hessian = hessian.float() / (1.0 if dead.all() else hessian.diagonal().amax())
    hessian.diagonal()[dead] = 1.0 if dead.all() else hessian.diagonal()[~dead].mean()
    order = torch.arange(k, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order], damping)  # (K, K) upper
    scale = _scales(weight, spec, exponents, line) if scales is None else scales.t()  # (K, N)
    ends = [] if bounds is None else [bound.t() for bound in bounds]
    with _one_thread(weight):
        rounded = _round_columns(columns[order], factor, scale[order], spec, [end[order] for end in ends])
    result = torch.empty_like(columns)
    result[order] = rounded
    inside = _within(columns[dead], [end[dead] for end in ends])
    result[dead] = elements.round_to_element(inside / scale[dead], spec.element, spec.rounding) * scale[dead]
    return result.t().contiguous()


def _scales(weight: Tensor, spec: MXSpec, exponents: Tensor | None, line: int | None) -> Tensor:
    """Return the scale of each value, (K, N) powers of two."""
    if exponents is None:
        exponents = block_exponents(weight, spec, line=line)
    check_exponents(exponents, weight, spec, line)
    return pow2(exponents.t())[block_of_column(weight.shape[1], spec, line).to(weight.device)]


@contextmanager
def _one_thread(x: Tensor) -> Iterator[None]:
    """Keep operators on the CPU in one thread: for columns of a few thousand values, threads wait for each other."""
    threads = torch.get_num_threads()
    if x.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _within(values: Tensor, ends: list[Tensor]) -> Tensor:
    """Return the values clamped between two ends of their shape, or the values without ends."""
    return values.clamp(*ends) if ends else values


def _round_columns(columns: Tensor, factor: Tensor, scale: Tensor, spec: MXSpec, ends: list[Tensor]) -> Tensor:
    """columns: (K, N), changed; factor: (K, K) upper; scale, ends: (K, N) -> (K, N) values of the format."""
    rounded = torch.empty_like(columns)
    inverse = scale.reciprocal()
    for first in range(0, len(columns), _PANEL):
        last = min(first + _PANEL, len(columns))
        errors = torch.empty_like(columns[first:last])
        for i in range(first, last):
            w = columns[i]
            inside = _within(w, [end[i] for end in ends])
            value = elements.round_to_element(inside * inverse[i], spec.element, spec.rounding)
            torch.mul(value, scale[i], out=rounded[i])
            error = torch.sub(w, rounded[i], out=errors[i - first]).div_(factor[i, i])
            if i + 1 < last:
                columns[i + 1 : last].addr_(factor[i, i + 1 : last], error, alpha=-1)
        if last < len(columns):
            columns[last:].addmm_(factor[first:last, last:].t(), errors, alpha=-1)
    return rounded


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian, (K, K): row i has the share of an error in column
    i that each column behind it makes up for."""
    mean = hessian.diagonal().mean()
    for factor in (1, 10, 100, 1000):
        damped = hessian.clone()
        damped.diagonal().add_(mean * max(damping, _LEAST_DAMPING) * factor)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    raise MXError(
        "the Hessian is far from positive semidefinite: it must be a sum of x.T @ x over inputs, with more damping "
        f"than {damping} where they are few"
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
