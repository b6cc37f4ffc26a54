"""The rounding of one weight for all that read it, and its error."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from pt2mx.algorithms import block_exponents, gptq
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.node import args_of
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.optimize.report import WeightReport
from pt2mx.pt2e.optimize.sites import Site, why_not_rounded
from pt2mx.spec import MXSpec

#: the scale modes by which GPTQ's blocks get their scales, and those of other weights
_EVEN, _LEAST_SQUARES = "even", "mse"

#: damping of GPTQ, and what is added to it, times columns over rows: of few inputs it would learn the noise (of random
#: ones, 64 rows of 256 columns, FP4: the error of others was 1.7 to 2.3 times that of rounding to nearest, and is 0.9
#: to 1.1 times; with 4,096 rows it is 0.52 times, and would be 0.51)
_DAMPING, _DAMPING_OF_FEW = 0.01, 0.5


@torch.no_grad()
def round_weight(site: Site, by_inputs: bool) -> tuple[Tensor | None, WeightReport]:
    """The rounded weight, or None where it stays, and its report. `by_inputs`: by GPTQ where inputs were observed."""
    spec, value = site.readers[0].spec, site.value.detach()
    if why := why_not_rounded(site):
        same = all(reader.spec == spec for reader in site.readers)
        return None, _report(site, spec if same else None, why=why)
    why = _not_by_gptq(site, spec) if by_inputs else "the preset looks at no inputs"
    algorithm = "scales" if why else "gptq"
    rounded = fake_quantize_mx(value, spec.replace(scale_mode=_LEAST_SQUARES)) if why else _by_gptq(site, value, spec)
    rounded = fake_quantize_mx(rounded.to(value.dtype), spec)  # as it will be stored
    before, after = (_error(site, value, q) for q in (fake_quantize_mx(value, spec), rounded))
    if not after < before:
        tried = f"{why}; scales of least error gain" if why else "gptq gains"
        return None, _report(site, spec, "", before, before, f"{tried} nothing over rounding to nearest")
    return rounded, _report(site, spec, algorithm, before, after, why)


def _not_by_gptq(site: Site, spec: MXSpec) -> str:
    """The reason for which GPTQ does not apply; "" where it does."""
    if not site.inputs:
        return "no product whose input is observed reads it"
    if any(layout.axis != spec.axis for layout, _ in site.inputs):
        return "its blocks do not run along the dimension that the product reduces"
    if not any(observer.count for _, observer in site.inputs):
        return "no batch reached what reads it"
    if not all(part.isfinite().all() for part in _hessians(site)):
        return "its inputs hold an Inf or a NaN, or their squares overflow"
    return ""


def _by_gptq(site: Site, value: Tensor, spec: MXSpec) -> Tensor:
    layout, _ = site.inputs[0]
    matrices, hessians = layout.to_matrices(value.float()), _hessians(site)
    even, line = spec.replace(scale_mode=_EVEN), value.shape[layout.axis]
    count = sum(observer.count for observer in dict.fromkeys(observer for _, observer in site.inputs))
    groups = []
    for g, matrix in enumerate(matrices):
        parts = zip(matrix.split(hessians[0].shape[-1], 1), hessians, strict=True)
        rounded = [_round_part(part, h[g], even, min(line, part.shape[1]), count) for part, h in parts]
        groups.append(torch.cat(rounded, 1))
    return layout.from_matrices(torch.stack(groups), value.shape)


def _round_part(part: Tensor, hessian: Tensor, spec: MXSpec, line: int, count: int) -> Tensor:
    damping = _DAMPING + _DAMPING_OF_FEW * part.shape[1] / count
    return gptq(part, hessian, spec, exponents=block_exponents(part, spec, line=line), line=line, damping=damping)


def _hessians(site: Site) -> list[Tensor]:
    """The sums over all inputs that the weight meets, by parts of its columns, (groups, K', K') each."""
    seen = dict.fromkeys(observer for _, observer in site.inputs if observer.count)
    return [sum(parts[1:], parts[0]) for parts in zip(*(observer.parts for observer in seen), strict=True)]


def _error(site: Site, value: Tensor, rounded: Tensor) -> float:
    """The share of the energy of the weight's products that rounding changes; of the weight itself, where its inputs
    were not observed."""
    hessians = _hessians(site) if any(observer.count for _, observer in site.inputs) else []
    if not all(part.isfinite().all() for part in hessians):
        hessians = []
    hessians = [part / max(map(_peak, hessians)) for part in hessians]
    energies, unit = [], _peak(value.float())
    for tensor in ((value.float() - rounded.float()) / unit, value.float() / unit):
        if not hessians:
            energies.append(float(tensor.square().sum(dtype=torch.float64)))
            continue
        matrices = site.inputs[0][0].to_matrices(tensor)
        parts = zip(matrices.split(hessians[0].shape[-1], 2), hessians, strict=True)
        energies.append(sum(float(((part @ h) * part).sum(dtype=torch.float64)) for part, h in parts))
    return energies[0] / energies[1] if energies[1] else 0.0


def _peak(values: Tensor) -> float:
    """The largest absolute value, by which squares of the others stay within fp32; not zero."""
    return max(float(values.abs().max()), torch.finfo(torch.float32).tiny)


def _report(
    site: Site, spec: MXSpec | None, algorithm: str = "", before: float = nan, after: float = nan, why: str = ""
) -> WeightReport:
    sources = [reader.product.source for reader in site.readers if reader.product is not None]
    rotated = max((args_of(source)[1] for source in sources if source.target is hadamard), default=0)
    return WeightReport(site.name, site.modules, spec, algorithm, rotated, before, after, why)
