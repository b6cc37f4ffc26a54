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
    first_node,
    insert_operator,
    transformable_matmuls,
)
from pt2mx.pt2e.optimize.folding import Folder
from pt2mx.pt2e.optimize.matmul_views import Matmul
from pt2mx.pt2e.optimize.observers import MXHessianObserver
from pt2mx.pt2e.optimize.targets import Consumer, WeightTarget, set_weight

#: smallest and largest exponent of a factor
_MIN_EXPONENT, _MAX_EXPONENT = -4, 10
#: inputs may be so many times as large as in calibration before they overflow
_HEADROOM = 16
_Pair = tuple[WeightTarget, Matmul]


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
    for source, pairs in _by_source(targets, written, options).items():
        consumers = [consumer for target, _ in pairs for consumer in target.consumers]
        exponents = (
            _exponents(model, pairs, inputs[consumers[0].node], options) if _were_observed(consumers, inputs) else None
        )
        if exponents is None or not exponents.any():
            continue
        factor = torch.exp2(exponents)
        for target, matmul in pairs:
            target.value = evaluate(model, target.node)  # folding an earlier factor may have changed it
            matrices = matmul.view.to_matrices(target.value) * factor.to(target.value.dtype)
            set_weight(model, target, matmul.view.from_matrices(matrices, target.value.shape))
        sole_users = set(source.users) == {consumer.node for consumer in consumers} and all(map(_reads_once, consumers))
        folded = folder.fold(source, 1 / factor) if sole_users else []
        if not folded:
            _divide(model, source, factor, consumers)
        smoothed: dict[int, MXHessianObserver] = {}
        for consumer in consumers:
            observer = inputs[consumer.node]
            inputs[consumer.node] = smoothed.setdefault(id(observer), _divided(observer, factor))
            where[consumer.node] = ", ".join(folded) or "div"
    return where


def _by_source(targets: list[WeightTarget], written: set[Node], options: Smoothing) -> dict[Node, list[_Pair]]:
    """Group the weights whose matmuls all read one tensor by that tensor."""
    by_source: dict[Node, list[_Pair]] = {}
    for target in targets:
        if any(consumer.node.graph is not target.node.graph for consumer in target.consumers):
            continue  # exported subgraphs have no buffers, which a `div` would need
        matmuls = transformable_matmuls(target, written)
        sources = {matmul.source for matmul in matmuls}
        if len(sources) == 1 and all(_gains(consumer, options) for consumer in target.consumers):
            by_source.setdefault(sources.pop(), []).append((target, matmuls[0]))
    return {source: pairs for source, pairs in by_source.items() if source.target is not hadamard}


def _gains(consumer: Consumer, options: Smoothing) -> bool:
    if consumer.activation is None:
        return options.weight_only and consumer.spec.element.bits < BITS
    return consumer.activation.element.bits < BITS


def _were_observed(consumers: list[Consumer], inputs: InputObservers) -> bool:
    observers = [inputs.get(consumer.node) for consumer in consumers]
    return all(one is not None and one.amax is not None and len(one.amax) == 1 for one in observers)


def _exponents(model: GraphModule, pairs: list[_Pair], seen: MXHessianObserver, options: Smoothing) -> Tensor | None:
    """Return the exponents of the factors for the weights' columns, (K,) float32 integers."""
    if seen.amax is None or not seen.amax.isfinite().all():
        return None
    values = [(evaluate(model, target.node), matmul.view) for target, matmul in pairs]
    columns = torch.stack([view.to_matrices(value).float().abs().amax((0, 1)) for value, view in values])
    weight, x = columns.amax(0), seen.amax[0].float()
    power = 0.0 if all(consumer.activation is None for target, _ in pairs for consumer in target.consumers) else 1.0
    log = options.strength * x.log2() - power * (1 - options.strength) * weight.log2()
    used = (x > 0) & (weight > 0)
    if not used.any():
        return None
    exponents = torch.where(used, log - log[used].median(), 0.0).round().clamp(_MIN_EXPONENT, _MAX_EXPONENT)
    kept = keeps_bits(x, -exponents, pairs[0][1].source.meta["val"].dtype)
    kept &= keeps_bits(columns, exponents, values[0][0].dtype).all(0)
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
    """Return the observer of an input divided by a factor, (K,)."""
    divided = copy.copy(observer)
    parts = zip(observer.parts, factor.split(observer.parts[0].shape[-1]), strict=True)
    divided.parts = [part / (f[:, None] * f).to(part.device) for part, f in parts]
    divided.amax = None if observer.amax is None else observer.amax / factor
    return divided


def _reads_once(consumer: Consumer) -> bool:
    """Return True if the matmul reads its input only once, not as a bias too."""
    return consumer.matmul is not None and list(consumer.node.args).count(consumer.matmul.source) == 1


def _divide(model: GraphModule, source: Node, factor: Tensor, consumers: list[Consumer]) -> None:
    """Divide the source by a factor for these consumers. It inserts a `div`, because a `mul` could itself be
    quantized."""
    value = factor.to(source.meta["val"].dtype)
    with model.graph.inserting_before(first_node(consumer.node for consumer in consumers)):
        buffer = model.graph.get_attr(register_buffer(model, f"{source.name}_smoothing", value))
    buffer.meta["val"] = source.meta["val"].new_empty(value.shape)
    positions = [(consumer.node, consumer.matmul.position) for consumer in consumers if consumer.matmul is not None]
    insert_operator(positions, torch.ops.aten.div.Tensor, (source, buffer))
