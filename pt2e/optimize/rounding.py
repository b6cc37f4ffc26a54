"""The rounding of one weight for all that read it, and its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan

import torch
from torch import Tensor

from pt2mx.algorithms import GPTQ, ScaleSearch, block_exponents, gptq, round_to_blocks
from pt2mx.algorithms.options import Algorithm
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.node import args_of
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.optimize.matmul_views import arranged_alike
from pt2mx.pt2e.optimize.observers import MXHessianObserver, with_mean_expert
from pt2mx.pt2e.optimize.report import WeightReport
from pt2mx.pt2e.optimize.targets import Site, why_not_rounded
from pt2mx.spec import MXSpec

#: the scale modes by which GPTQ's blocks get their scales, and those of other weights
_EVEN, _LEAST_SQUARES = "even", "mse"

#: a part of the weight's columns, the Hessian of their inputs and the rows it is of -> the rounded part
_Round = Callable[[Tensor, Tensor, float], Tensor]


@torch.no_grad()
def round_weight(site: Site, algorithms: Sequence[Algorithm]) -> tuple[Tensor | None, WeightReport]:
    """The rounded weight, or None where it stays, and its report: by GPTQ where that is chosen and inputs were
    observed, else by a search of scales, where that is chosen."""
    spec, value = site.readers[0].spec, site.value.detach()
    if why := why_not_rounded(site):
        same = all(reader.spec == spec for reader in site.readers)
        return None, _report(site, spec if same else None, why=why)
    chosen = {type(one): one for one in algorithms}
    by_gptq, by_scales = chosen.get(GPTQ), chosen.get(ScaleSearch)
    why = _not_by_inputs(site, spec) if by_gptq else "GPTQ is not chosen"
    if why and by_scales is None:
        return None, _report(site, spec, why=f"{why}, and no search of scales")
    algorithm = "scales" if why else "gptq"
    if isinstance(by_gptq, GPTQ) and not why:
        rounded = _by_parts(site, value, _gptq(site, spec, by_gptq))
    elif isinstance(by_scales, ScaleSearch) and by_scales.by_inputs and not _not_by_inputs(site, spec):
        rounded = _by_parts(site, value, _weighted_scales(site, spec))
    else:
        rounded = fake_quantize_mx(value, spec.replace(scale_mode=_LEAST_SQUARES))
    rounded = fake_quantize_mx(rounded.to(value.dtype), spec)  # as it will be stored
    before, after = rounding_errors(site, fake_quantize_mx(value, spec), rounded)
    if not after < before:
        tried = f"{why}; scales of least error gain" if why else "gptq gains"
        return None, _report(site, spec, "", before, before, f"{tried} nothing over rounding to nearest")
    return rounded, _report(site, spec, algorithm, before, after, why)


def _not_by_inputs(site: Site, spec: MXSpec) -> str:
    """The reason for which the inputs of the weight's products say nothing of it; "" where they do."""
    if not site.inputs:
        return "no product whose input is observed reads it"
    if any(layout.axis != spec.axis for layout, _ in site.inputs):
        return "its blocks do not run along the dimension that the product reduces"
    if not _are_alike(site):
        return "its products reduce other dimensions of it"
    if not any(observer.count for _, observer in site.inputs):
        return "no batch reached what reads it"
    if not all(part.isfinite().all() for part in _hessians(site)):
        return "its inputs hold an Inf or a NaN, or their squares overflow"
    return ""


def _by_parts(site: Site, value: Tensor, round_part: _Round) -> Tensor:
    layout, _ = site.inputs[0]
    matrices, hessians = layout.to_matrices(value.float()), _hessians(site)
    counts = torch.stack([observer.counts for observer in _seen(site)]).sum(0)
    if layout.experts:
        hessians, counts = with_mean_expert(hessians, counts)
    groups = []
    for g, (matrix, count) in enumerate(zip(matrices, counts.tolist(), strict=True)):
        parts = zip(matrix.split(hessians[0].shape[-1], 1), hessians, strict=True)
        groups.append(torch.cat([round_part(part, h[g], count) for part, h in parts], 1))
    return layout.from_matrices(torch.stack(groups), value.shape)


def _gptq(site: Site, spec: MXSpec, options: GPTQ) -> _Round:
    """GPTQ with scales chosen beforehand. Of few inputs it would learn the noise: of random ones, 64 rows of 256
    columns, FP4, the error of others was 1.7 to 2.3 times that of rounding to nearest, and is 0.9 to 1.1 times; with
    4,096 rows it is 0.52 times, and would be 0.51."""
    even, length = spec.replace(scale_mode=_EVEN), _line(site)

    def round_part(part: Tensor, hessian: Tensor, count: float) -> Tensor:
        line, damping = min(length, part.shape[1]), options.damping + options.damping_of_few * part.shape[1] / count
        exponents = block_exponents(part, even, line=line)
        return gptq(part, hessian, even, exponents=exponents, line=line, damping=damping, act_order=options.act_order)

    return round_part


def _weighted_scales(site: Site, spec: MXSpec) -> _Round:
    even, length = spec.replace(scale_mode=_EVEN), _line(site)

    def round_part(part: Tensor, hessian: Tensor, count: float) -> Tensor:
        line = min(length, part.shape[1])
        exponents = block_exponents(part, even, importance=hessian.diagonal(), line=line)
        return round_to_blocks(part, exponents, even, line=line)

    return round_part


def _line(site: Site) -> int:
    """The columns after which blocks start anew."""
    return site.value.shape[site.inputs[0][0].axis]


def _hessians(site: Site) -> list[Tensor]:
    """The sums over all inputs that the weight meets, by parts of its columns, (groups, K', K') each."""
    device, every = site.value.device, [observer.parts for observer in _seen(site)]
    return [sum((part.to(device) for part in parts[1:]), parts[0].to(device)) for parts in zip(*every, strict=True)]


def _seen(site: Site) -> list[MXHessianObserver]:
    """The observers of the weight's inputs that have seen any, each once; none where their sums do not add up."""
    return list(dict.fromkeys(observer for _, observer in site.inputs if observer.count and _are_alike(site)))


def _are_alike(site: Site) -> bool:
    return arranged_alike([layout for layout, _ in site.inputs], site.value.shape)


@torch.no_grad()
def rounding_errors(site: Site, *roundings: Tensor) -> list[float]:
    """The share of the energy of the weight's products that each rounding changes; of the rows that embeddings read, as
    often as they do; of the weight itself, where its inputs were not observed."""
    value = site.value.detach()
    hessians = _hessians(site)
    if not all(part.isfinite().all() for part in hessians):
        hessians = []
    hessians = [part / max(map(_peak, hessians)) for part in hessians]
    unit = _peak(value.float())
    reads = sum((observer.counts.to(value.device) for observer in site.rows), torch.zeros(1, device=value.device))

    def energy(tensor: Tensor) -> float:
        if not hessians:
            rows = tensor.square().flatten(1).sum(1, dtype=torch.float64) if tensor.dim() > 1 else tensor.square()
            return float((rows * reads).sum() if reads.any() else rows.sum(dtype=torch.float64))
        matrices = site.inputs[0][0].to_matrices(tensor)
        parts = zip(matrices.split(hessians[0].shape[-1], 2), hessians, strict=True)
        return sum(float(((part @ h) * part).sum(dtype=torch.float64)) for part, h in parts)

    whole = energy(value.float() / unit)
    return [energy((value.float() - one.float()) / unit) / whole if whole else 0.0 for one in roundings]


def _peak(values: Tensor) -> float:
    """The largest absolute value, by which squares of the others stay within fp32; not zero."""
    return max(float(values.abs().max()), torch.finfo(torch.float32).tiny)


def _report(
    site: Site, spec: MXSpec | None, algorithm: str = "", before: float = nan, after: float = nan, why: str = ""
) -> WeightReport:
    sources = [reader.product.source for reader in site.readers if reader.product is not None]
    rotated = max((args_of(source)[1] for source in sources if source.target is hadamard), default=0)
    return WeightReport(site.name, site.modules, spec, algorithm, site.smoothed, rotated, before, after, why)
