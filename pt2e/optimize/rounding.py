"""Round one weight for all its consumers, and measure the error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, nan

import torch
from torch import Tensor

from pt2mx.algorithms import GPTQ, ScaleSearch, block_exponents, cell_bounds, keep_slices, round_to_blocks
from pt2mx.algorithms.block_scales import BlockScales, choose_scales
from pt2mx.algorithms.gptq import gptq_of_groups
from pt2mx.algorithms.options import Algorithm
from pt2mx.algorithms.scales import scales_of_values
from pt2mx.functional import fake_quantize_mx, tensor_scale_mx
from pt2mx.fx.graph.node import args_of
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.optimize.distributed import Rounded
from pt2mx.pt2e.optimize.fold_rotation import ROTATED_KEY
from pt2mx.pt2e.optimize.matmul_views import same_matrices
from pt2mx.pt2e.optimize.observers import MXHessianObserver, with_mean_expert
from pt2mx.pt2e.optimize.report import WeightReport
from pt2mx.pt2e.optimize.targets import WeightTarget, reason_not_rounded
from pt2mx.spec import MXSpec

#: the scale mode of GPTQ's blocks, and of the scale search
_EVEN, _LEAST_SQUARES = "even", "mse"

#: values of the groups that are rounded together, and of their Hessians
_VALUES_AT_ONCE = 1 << 20

#: Hessians of a part of the columns, (groups, K', K'), numbers of rows, (groups,), the part of each tensor,
#: (groups, N, K') -> the rounded part
_RoundPart = Callable[..., Tensor]


@torch.no_grad()
def round_weight(target: WeightTarget, algorithms: Sequence[Algorithm], anchor: MXSpec | None = None) -> Rounded:
    """Return the rounded weight, or None if it does not change, its scales where they do not follow from it, and its
    report. With `anchor` the weight has values of that format that quantize to the rounded ones; the report describes
    these.

    This uses GPTQ if it is selected and the inputs were observed; otherwise the scale search, if selected.
    """
    spec, value = target.consumers[0].spec, target.value.detach()
    if reason := reason_not_rounded(target):
        same = all(consumer.spec == spec for consumer in target.consumers)
        return None, None, _report(target, spec if same else None, reason=reason)
    by_gptq, by_scales = None, None
    for algorithm in algorithms:
        if isinstance(algorithm, GPTQ):
            by_gptq = algorithm
        elif isinstance(algorithm, ScaleSearch):
            by_scales = algorithm
    unguided = _reason_without_inputs(target, spec)
    reason = unguided if by_gptq else "GPTQ is not chosen"
    if reason and by_scales is None:
        kept = None if anchor is None else _nested(target, fake_quantize_mx(value, spec), spec, anchor, None)
        return kept, None, _report(target, spec, reason=f"{reason}, and no search of scales")
    if reason:
        by_gptq, target.goal = None, None
    by_inputs = by_scales is not None and by_scales.by_inputs and not unguided
    rounded, scales = _round(target, spec, by_gptq, by_inputs)
    t = None if target.amax is None else tensor_scale_mx(target.amax, spec)
    nearest = fake_quantize_mx(value, spec, tensor_scale=t)
    before, after = rounding_errors(target, nearest, rounded)
    if not after < before:
        tried = f"{reason}; scales of least error gain" if reason else "gptq gains"
        kept = None if anchor is None else _nested(target, nearest, spec, anchor, by_gptq)
        return kept, None, _report(target, spec, "", before, before, f"{tried} nothing over rounding to nearest")
    if anchor is not None:
        rounded = _nested(target, rounded, spec, anchor, by_gptq)
    return rounded, scales, _report(target, spec, "gptq" if by_gptq else "scales", before, after, reason)


def _nested(target: WeightTarget, rounded: Tensor, spec: MXSpec, anchor: MXSpec, by_gptq: GPTQ | None) -> Tensor:
    """Return values of the anchor near the weight that quantize to the rounded ones."""
    anchor = anchor.replace(axis=spec.axis)
    value, even = target.value.detach(), anchor.replace(scale_mode=_EVEN)
    bounds = cell_bounds(rounded, spec, value, even)
    values = value.float().clamp(*bounds) if by_gptq is None else _by_gptq(target, even, by_gptq, bounds=bounds)
    return keep_slices(values.to(value.dtype), rounded, spec, anchor)


def _round(
    target: WeightTarget, spec: MXSpec, by_gptq: GPTQ | None, by_inputs: bool
) -> tuple[Tensor, BlockScales | None]:
    """Return a rounded weight, and its scales if they have a significand; powers of two follow from the result."""
    value = target.value.detach()
    if spec.has_power_of_two_scale:
        even = spec.replace(scale_mode=_EVEN)
        if by_gptq is not None:
            rounded = _by_gptq(target, even, by_gptq)
        elif by_inputs:
            rounded = _by_weighted_scales(target, even)
        else:
            rounded = fake_quantize_mx(value, spec.replace(scale_mode=_LEAST_SQUARES))
        return fake_quantize_mx(rounded.to(value.dtype), spec), None  # as it will be stored
    importance = _round_by_parts(target, _importance) if by_gptq or by_inputs else None
    scales = choose_scales(target.wanted, spec, importance, target.amax)
    if by_gptq is None:
        return scales.round(value).to(value.dtype), scales
    multipliers = scales.of_values(value.shape[spec.axis])
    return _by_gptq(target, spec, by_gptq, multipliers).to(value.dtype), scales


def _reason_without_inputs(target: WeightTarget, spec: MXSpec) -> str:
    """Return why the observed inputs cannot guide the rounding of a weight; "" if they can."""
    if not target.inputs:
        return "no matmul with an observed input uses it"
    if any(view.axis != spec.axis for view, _ in target.inputs):
        return "its blocks do not run along the dimension that the matmul reduces"
    if not _same_views(target):
        return "its matmuls reduce other dimensions of it"
    if not any(observer.count for _, observer in target.inputs):
        return "no batch reached its operators"
    if not all(isfinite(_peak(part)) for part in _hessians(target)):
        return "its inputs hold an Inf or a NaN, or their squares overflow"
    return ""


def _round_by_parts(target: WeightTarget, round_part: _RoundPart, *others: Tensor) -> Tensor:
    """Return the results of `round_part` for the parts of a weight and of other tensors of its shape."""
    view, _ = target.inputs[0]
    value, hessians = target.wanted, _hessians(target)
    counts = torch.stack([observer.counts for observer in _observers_of(target)]).sum(0)
    if view.experts:
        hessians, counts = with_mean_expert(hessians, counts)
    tensors = [view.to_matrices(tensor.float()) for tensor in (value, *others)]
    groups, n, k = tensors[0].shape
    widths = [hessian.shape[-1] for hessian in hessians]
    rounded = tensors[0].new_empty(groups, n, k)
    for some in torch.arange(groups).split(max(_VALUES_AT_ONCE // (max(n, k) * k), 1)):
        # indices copy the values, which a part may overwrite
        parts = zip(*(tensor[some].split(widths, 2) for tensor in tensors), strict=True)
        first = 0
        for hessian, part in zip(hessians, parts, strict=True):
            last = first + hessian.shape[-1]
            rounded[some, :, first:last] = round_part(hessian[some], counts[some].to(value.device), *part)
            first = last
    return view.from_matrices(rounded, value.shape)


def _importance(hessians: Tensor, counts: Tensor, part: Tensor) -> Tensor:
    """Return the mean square of the input that meets each value, up to a factor."""
    return hessians.diagonal(dim1=1, dim2=2).unsqueeze(1).expand_as(part)


def _by_gptq(
    target: WeightTarget, spec: MXSpec, options: GPTQ, scales: Tensor | None = None, bounds: Sequence[Tensor] = ()
) -> Tensor:
    """Return a weight rounded by GPTQ with fixed scales, or with powers of two by the mode of `spec`.

    With few rows of input GPTQ needs more damping, or it fits their noise. Error on other random inputs than in
    calibration, relative to rounding to nearest (FP4, 256 columns): with 64 rows 0.9 to 1.1 with this damping and 1.7
    to 2.3 without; with 4,096 rows 0.52 with it and 0.51 without.
    """

    def with_scales(
        hessians: Tensor, counts: Tensor, part: Tensor, scales: Tensor, bounds: Sequence[Tensor] = ()
    ) -> Tensor:
        damping = options.damping + options.damping_of_few * part.shape[2] / counts
        return gptq_of_groups(part, hessians, spec, scales, damping, options.act_order, bounds)

    def with_powers(hessians: Tensor, counts: Tensor, part: Tensor, *bounds: Tensor) -> Tensor:
        line = _line(target, part)
        exponents = block_exponents(part.flatten(0, 1), spec, line=line)
        powers = scales_of_values(exponents, part.shape[2], spec, line).view_as(part)
        return with_scales(hessians, counts, part, powers, bounds)

    if scales is None:
        return _round_by_parts(target, with_powers, *bounds)
    return _round_by_parts(target, with_scales, scales)


def _by_weighted_scales(target: WeightTarget, spec: MXSpec) -> Tensor:
    """Return a weight rounded with the powers of two of least squared error, weighted by the input of each value."""

    def round_part(hessians: Tensor, counts: Tensor, part: Tensor) -> Tensor:
        line = _line(target, part)
        rounded = []
        for matrix, hessian in zip(part, hessians, strict=True):
            exponents = block_exponents(matrix, spec, importance=hessian.diagonal(), line=line)
            rounded.append(round_to_blocks(matrix, exponents, spec, line=line))
        return torch.stack(rounded)

    return _round_by_parts(target, round_part)


def _line(target: WeightTarget, part: Tensor) -> int:
    """Return the number of columns after which the blocks of a part restart."""
    view, _ = target.inputs[0]
    return min(target.value.shape[view.axis], part.shape[2])


def _hessians(target: WeightTarget) -> list[Tensor]:
    """Return the sums over all inputs of the weight, for each part of its columns, (groups, K', K')."""
    sums: list[Tensor] = []
    for observer in _observers_of(target):
        parts = [part.to(target.value.device) for part in observer.parts]
        sums = list(map(torch.add, sums, parts)) if sums else parts
    return sums


def _observers_of(target: WeightTarget) -> list[MXHessianObserver]:
    """Return the distinct observers of the weight's inputs that saw rows; none if their sums cannot be added."""
    if not _same_views(target):
        return []
    return list(dict.fromkeys(observer for _, observer in target.inputs if observer.count))


def _same_views(target: WeightTarget) -> bool:
    return same_matrices([view for view, _ in target.inputs], target.value.shape)


@torch.no_grad()
def rounding_errors(target: WeightTarget, *roundings: Tensor) -> list[float]:
    """Return the relative squared error that each rounding causes.

    The error is measured on the matmuls with the observed inputs; for an embedding, on its rows weighted by how often
    they were read; otherwise on the weight itself.
    """
    value = target.wanted.float()
    hessians = _hessians(target)
    peaks = [_peak(hessian) for hessian in hessians]
    hessians = [hessian / max(peaks) for hessian in hessians] if all(map(isfinite, peaks)) else []
    unit = _peak(value)
    reads = torch.zeros(1, device=value.device)
    for observer in target.rows:
        reads = reads + observer.counts.to(value.device)

    def energy(tensor: Tensor) -> float:
        if hessians:
            parts = target.inputs[0][0].to_matrices(tensor).split(hessians[0].shape[-1], 2)
            total = 0.0
            for part, hessian in zip(parts, hessians, strict=True):
                total += float(((part @ hessian) * part).sum(dtype=torch.float64))
            return total
        rows = tensor.square()
        if tensor.dim() > 1:
            rows = rows.flatten(1).sum(1, dtype=torch.float64)
        return float((rows * reads).sum() if reads.any() else rows.sum(dtype=torch.float64))

    whole = energy(value / unit)
    return [energy((value - rounded.float()) / unit) / whole if whole else 0.0 for rounded in roundings]


def _peak(values: Tensor) -> float:
    """Return the largest absolute value, never zero; Inf or NaN if a value is. Dividing by it keeps squares within
    float32."""
    least, most = map(float, torch.aminmax(values))
    return max(-least, most, torch.finfo(torch.float32).tiny)


def _report(
    target: WeightTarget,
    spec: MXSpec | None,
    algorithm: str = "",
    before: float = nan,
    after: float = nan,
    reason: str = "",
) -> WeightReport:
    rotated = 0
    for consumer in target.consumers:
        rotated = max(rotated, consumer.node.meta.get(ROTATED_KEY, 0))
        if consumer.matmul is not None and consumer.matmul.source.target is hadamard:
            rotated = max(rotated, args_of(consumer.matmul.source)[1])
    return WeightReport(target.name, target.modules, spec, algorithm, target.smoothed, rotated, before, after, reason)
