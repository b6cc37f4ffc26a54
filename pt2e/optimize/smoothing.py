"""Smoothing: divide large input channels by powers of two, and multiply the weight's columns by the same powers.

Sources: SmoothQuant (Xiao et al., arXiv:2211.10438) for quantized inputs, AWQ (Lin et al., arXiv:2306.00978) for
others. The input's factor is folded into the operator that computes the input, if `folding` proves this possible.
Otherwise smoothing inserts a `div`, one for all matmuls that read the tensor. Powers of two do not change the rounding
of the float model, except for values that leave the normal range of their dtype. `keeps_bits` excludes channels that
would lose precision this way.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.algorithms import Smoothing
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import evaluate
from pt2mx.fx.graph.node import register_buffer
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.optimize.equivalent_transforms import (
    BITS,
    InputObservers,
    insert_operator,
    transformable_matmuls,
)
from pt2mx.pt2e.optimize.folding import Folder
from pt2mx.pt2e.optimize.matmul_views import MatmulView
from pt2mx.pt2e.optimize.observers import MXHessianObserver
from pt2mx.pt2e.optimize.targets import Consumer, WeightTarget, set_weight

#: smallest and largest exponent of a factor
_MIN_EXPONENT, _MAX_EXPONENT = -4, 10
#: inputs may be so many times as large as in calibration before they overflow
_HEADROOM = 16
_Weight = tuple[WeightTarget, MatmulView]


@torch.no_grad()
def smooth_matmuls(
    model: GraphModule, targets: list[WeightTarget], inputs: InputObservers, options: Smoothing
) -> dict[Node, str]:
    """Smooth the weights that only linear layers and matmuls use.

    Changes `model`, and replaces the observers of smoothed inputs. Returns for each matmul the parameters into which
    the input's factor was folded, or "div".
    """
    written, folder = written_nodes(model.graph), Folder(model, any(target.in_place for target in targets))
    where: dict[Node, str] = {}
    for source, smoothed in _by_source(targets, written, options).items():
        consumers: list[Consumer] = []
        for target, _ in smoothed:
            consumers += target.consumers
        exponents = _exponents(model, source, smoothed, inputs, options)
        if exponents is None or not exponents.any():
            continue
        factor = torch.exp2(exponents)
        for target, view in smoothed:
            target.value = evaluate(model, target.node)  # folding an earlier factor may have changed it
            matrices = view.to_matrices(target.value) * factor.to(target.value.dtype)
            set_weight(model, target, view.from_matrices(matrices, target.value.shape))
        # a user that reads the source twice has it as a bias, too
        sole_users = set(source.users) == {consumer.node for consumer in consumers}
        sole_users = sole_users and all(list(user.args).count(source) == 1 for user in source.users)
        folded = folder.fold(source, 1 / factor) if sole_users else []
        if not folded:
            _divide(model, source, factor, consumers)
        divided: dict[MXHessianObserver, MXHessianObserver] = {}
        for consumer in consumers:
            observer = inputs[consumer.node]
            if observer not in divided:
                divided[observer] = _divided(observer, factor)
            inputs[consumer.node] = divided[observer]
            where[consumer.node] = ", ".join(folded) or "div"
    return where


def _by_source(targets: list[WeightTarget], written: set[Node], options: Smoothing) -> dict[Node, list[_Weight]]:
    """Group the weights whose matmuls all read one tensor by that tensor."""
    by_source: dict[Node, list[_Weight]] = {}
    for target in targets:
        if any(consumer.node.graph is not target.node.graph for consumer in target.consumers):
            continue  # exported subgraphs have no buffers, which a `div` would need
        matmuls = transformable_matmuls(target, written)
        sources = {matmul.source for matmul in matmuls}
        if len(sources) != 1 or not all(_gains(consumer, options) for consumer in target.consumers):
            continue
        if matmuls[0].source.target is not hadamard:
            by_source.setdefault(matmuls[0].source, []).append((target, matmuls[0].view))
    return by_source


def _gains(consumer: Consumer, options: Smoothing) -> bool:
    if consumer.activation is None:
        return options.weight_only and consumer.spec.element.bits < BITS
    return consumer.activation.element.bits < BITS


def _exponents(
    model: GraphModule, source: Node, weights: list[_Weight], inputs: InputObservers, options: Smoothing
) -> Tensor | None:
    """Return the exponents of the factors for the weights' columns, (K,) float32 integers; None without factors."""
    largest: list[Tensor] = []
    power = 0.0  # of the weights in a factor: they have none where no input is quantized
    for target, _ in weights:
        for consumer in target.consumers:
            observer = inputs.get(consumer.node)
            if observer is None or observer.amax is None or len(observer.amax) != 1:
                return None
            largest.append(observer.amax[0])
            power = power if consumer.activation is None else 1.0
    if not largest[0].isfinite().all():
        return None
    values = [evaluate(model, target.node) for target, _ in weights]
    columns = torch.stack(
        [view.to_matrices(value).float().abs().amax((0, 1)) for value, (_, view) in zip(values, weights, strict=True)]
    )
    weight, x = columns.amax(0), largest[0].float()
    log = options.strength * x.log2() - power * (1 - options.strength) * weight.log2()
    used = (x > 0) & (weight > 0)
    if not used.any():
        return None
    exponents = torch.where(used, log - log[used].median(), 0.0).round().clamp(_MIN_EXPONENT, _MAX_EXPONENT)
    kept = keeps_bits(x, -exponents, source.meta["val"].dtype)
    kept &= keeps_bits(columns, exponents, values[0].dtype).all(0)
    return torch.where(kept, exponents, 0.0)


def keeps_bits(largest: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where multiplying values up to `largest` by 2**exponents keeps their bits.

    Values up to `_HEADROOM` times as large must not overflow. Values that become subnormal, in float16 those below
    2**-14, must lose less than the square of the dtype's precision, relative to the largest.
    """
    limits, scaled = torch.finfo(dtype), largest * torch.exp2(exponents)
    above = (exponents <= 0) | (scaled <= limits.max / _HEADROOM)
    return above & ((exponents >= 0) | (scaled >= limits.tiny / limits.eps) | (largest == 0))


def _divided(observer: MXHessianObserver, factor: Tensor) -> MXHessianObserver:
    divided = copy.copy(observer)
    divided.parts = []
    for part, f in zip(observer.parts, factor.split(observer.parts[0].shape[-1]), strict=True):
        divided.parts.append(part / (f[:, None] * f).to(part.device))
    divided.amax = None if observer.amax is None else observer.amax / factor
    return divided


def _divide(model: GraphModule, source: Node, factor: Tensor, consumers: list[Consumer]) -> None:
    """Divide the source by a factor for these consumers. It inserts a `div`, because a `mul` could itself be
    quantized."""
    value = factor.to(source.meta["val"].dtype)
    with model.graph.inserting_before(min(consumer.node for consumer in consumers)):
        buffer = model.graph.get_attr(register_buffer(model, f"{source.name}_smoothing", value))
    buffer.meta["val"] = source.meta["val"].new_empty(value.shape)
    positions = [(consumer.node, consumer.matmul.position) for consumer in consumers if consumer.matmul is not None]
    insert_operator(positions, torch.ops.aten.div.Tensor, (source, buffer))
