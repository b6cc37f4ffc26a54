"""Rotation: spread the outliers of inputs and weights over 32 channels (QuaRot, SpinQuant).

Rotating both operands of a matmul along the reduced dimension leaves the result unchanged. `optimize` rotates the
weight now. A node of the graph rotates the input (`torch.ops.pt2mx.hadamard`), one node for all matmuls that read it.
Nodes rotate both queries and keys.
"""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Node

from pt2mx.algorithms import Rotation
from pt2mx.fx.graph.higher_order_ops import written_in
from pt2mx.fx.graph.node import args_of, dtype_of, shape_of
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.observe.torchao_pt2e import Quantizer
from pt2mx.pt2e.optimize.equivalent_transforms import (
    BITS,
    InputObservers,
    fixed_nodes,
    insert_operator,
    transformable_matmuls,
)
from pt2mx.pt2e.optimize.observers import MXHessianObserver
from pt2mx.pt2e.optimize.targets import Consumer, WeightTarget, quantized_inputs, set_weight
from pt2mx.spec import MXSpec

#: fewest values that are rotated together, and the most by default
_SMALLEST, _DEFAULT = 4, 32


@torch.no_grad()
def rotate_matmuls(model: GraphModule, targets: list[WeightTarget], inputs: InputObservers, options: Rotation) -> None:
    """Rotate weights that only linear layers and matmuls use, and their inputs.

    Changes `model`, and replaces the observers of the rotated inputs.
    """
    fixed = fixed_nodes(model)
    rotated: dict[tuple[Node, int], list[tuple[Node, int]]] = {}
    # weak keys free an observer after its last consumer, so that only one sum exists twice at a time
    seen: WeakKeyDictionary[MXHessianObserver, dict[int, MXHessianObserver]] = WeakKeyDictionary()
    for target in targets:
        size = _size(target, fixed, inputs, options)
        if not size or not all(_fits_rotated(consumer, inputs, size) for consumer in target.consumers):
            continue
        value = hadamard(target.value, size, target.consumers[0].spec.axis)
        if not value.isfinite().all():
            continue
        set_weight(model, target, value)
        for consumer in target.consumers:
            if consumer.matmul is not None:
                readers = rotated.setdefault((consumer.matmul.source, size), [])
                readers.append((consumer.node, consumer.matmul.position))
            observer = inputs.get(consumer.node)
            if observer is not None:
                by_size = seen.setdefault(observer, {})
                if size not in by_size:
                    by_size[size] = _rotated(observer, size)
                inputs[consumer.node] = by_size[size]
    for (source, size), consumers in rotated.items():
        insert_operator(consumers, hadamard, (source, size, -1))


def rotate_attention(model: GraphModule, quantizer: Quantizer, options: Rotation) -> None:
    """Rotate queries and keys, and the operands of other matmuls of two quantized activations.

    Changes `model`.
    """
    written = written_in(model)
    specs: dict[Node, dict[Node, MXSpec]] = {}
    for node, tensor, role, spec in quantized_inputs(model, quantizer):
        if role != "weight" and node.target in _TWO_FACTORS:
            specs.setdefault(node, {})[tensor] = spec
    for node, of_inputs in specs.items():
        factors = list(zip(args_of(node), _TWO_FACTORS[node.target], strict=False))
        lengths = {_length(x, axis, of_inputs.get(x)) for x, axis in factors}
        length = lengths.pop()
        if not length or lengths or len({x for x, _ in factors} - written) != 2:
            continue
        size = min(_largest(length, options, of_inputs[x]) for x, _ in factors)
        if size:
            for i, (x, axis) in enumerate(factors):
                insert_operator([(node, i)], hadamard, (x, size, axis))


#: operator -> the reduced dimensions of its first two arguments, counted from the end
_TWO_FACTORS: dict[object, tuple[int, int]] = {
    torch.ops.aten.scaled_dot_product_attention.default: (-1, -1),
    torch.ops.aten.matmul.default: (-1, -2),
    torch.ops.aten.bmm.default: (-1, -2),
}


def _length(x: Node, axis: int, spec: MXSpec | None) -> int:
    """Return the length of an operand along the reduced dimension; 0 if rotation would gain nothing."""
    shape = shape_of(x) or ()
    if spec is None or spec.element.bits >= BITS or x.target is hadamard or spec.axis != axis + len(shape):
        return 0
    length = shape[axis]
    return length if isinstance(length, int) else 0


def _size(target: WeightTarget, fixed: set[Node], inputs: InputObservers, options: Rotation) -> int:
    """Return how many values of a weight are rotated together; 0 for a weight that is not rotated."""
    matmuls, spec = transformable_matmuls(target, fixed), target.consumers[0].spec
    if not matmuls or spec.element.bits >= BITS or spec.axis != matmuls[0].view.axis:
        return 0
    if any(matmul.source.target is hadamard for matmul in matmuls):  # a second rotation would undo the first
        return 0
    size = _largest(target.value.shape[spec.axis], options, spec)
    for consumer in target.consumers:
        observer = inputs.get(consumer.node)
        if size and observer is not None and any(part.shape[-1] % size for part in observer.parts):
            return 0
    return size


def _fits_rotated(consumer: Consumer, inputs: InputObservers, size: int) -> bool:
    """Return False if a rotated block of the inputs seen in calibration could overflow.

    Neither the sums, in float32, nor the result, in the inputs' dtype, may overflow.
    """
    observer = inputs.get(consumer.node)
    if observer is None or observer.amax is None or consumer.matmul is None:
        return True
    sums = observer.amax.float().unflatten(-1, (-1, size)).sum(-1)
    largest = torch.finfo(dtype_of(consumer.matmul.source) or torch.float32).max
    return bool((sums.isfinite() & (sums * size**-0.5 <= largest)).all())


def _largest(values: int, options: Rotation, spec: MXSpec) -> int:
    """Return the largest power of two up to `options.size` that divides `values`; 0 if it is too small. Scales with a
    significand follow the values of their block closely, so that an outlier must not leave it."""
    size = min(options.size or _DEFAULT, values & -values)
    if not spec.has_power_of_two_scale:
        size = min(size, spec.block_size & -spec.block_size)
    return size if size >= _SMALLEST else 0


def _rotated(observer: MXHessianObserver, size: int) -> MXHessianObserver:
    """Return the observer of the rotated input; its largest values are unknown."""
    rotated = copy.copy(observer)
    rotated.parts = [hadamard(hadamard(part, size, -1), size, -2) for part in observer.parts]
    rotated.amax = None
    return rotated
