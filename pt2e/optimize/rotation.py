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
from pt2mx.fx.graph.higher_order_ops import graph_modules, written_in
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

#: fewest values that are rotated together
_SMALLEST = 4


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
        if size := _size(target, fixed, inputs, options):
            value = hadamard(target.value, size, target.consumers[0].spec.axis)
            if not value.isfinite().all() or not all(
                _fits_rotated(consumer, inputs, size) for consumer in target.consumers
            ):
                continue
            set_weight(model, target, value)
            for consumer in target.consumers:
                if consumer.matmul is not None:
                    rotated.setdefault((consumer.matmul.source, size), []).append(
                        (consumer.node, consumer.matmul.position)
                    )
                if (observer := inputs.get(consumer.node)) is not None:
                    by_size = seen.setdefault(observer, {})
                    by_size[size] = by_size.get(size) or _rotated(observer, size)
                    inputs[consumer.node] = by_size[size]
    for (source, size), consumers in rotated.items():
        insert_operator(consumers, hadamard, (source, size, -1))


def rotate_attention(model: GraphModule, quantizer: Quantizer, options: Rotation) -> None:
    """Rotate queries and keys, and the operands of other matmuls of two quantized activations.

    Changes `model`.
    """
    written = written_in(model)
    quantized = {(n, tensor): spec for n, tensor, role, spec in quantized_inputs(model, quantizer) if role != "weight"}
    for node in [node for graph in graph_modules(model) for node in graph.graph.nodes]:
        factors = list(zip(args_of(node), _TWO_FACTORS.get(node.target, ()), strict=False))
        specs = [spec for x, _ in factors if (spec := quantized.get((node, x))) is not None]
        lengths = {_length(x, axis, quantized.get((node, x))) for x, axis in factors if x not in written}
        length = lengths.pop() if len(lengths) == 1 else 0
        size = min((_largest(length, options, spec) for spec in specs), default=0)
        if size and len({x for x, _ in factors} - written) == 2:
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
    matmuls = transformable_matmuls(target, fixed)
    if not matmuls or target.consumers[0].spec.element.bits >= BITS:
        return 0
    if any(p.source.target is hadamard for p in matmuls):  # a second rotation would undo the first
        return 0
    axis = matmuls[0].view.axis
    if {consumer.spec.axis for consumer in target.consumers} != {axis}:
        return 0
    size = _largest(target.value.shape[axis], options, target.consumers[0].spec)
    parts = [part for consumer in target.consumers if consumer.node in inputs for part in inputs[consumer.node].parts]
    return size if size and all(part.shape[-1] % size == 0 for part in parts) else 0


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
    size = min(options.size, values & -values)
    if not spec.has_power_of_two_scale:
        size = min(size, spec.block_size & -spec.block_size)
    return size if size >= _SMALLEST else 0


def _rotated(observer: MXHessianObserver, size: int) -> MXHessianObserver:
    """Return the observer of the rotated input; its largest values are unknown."""
    rotated = copy.copy(observer)
    rotated.parts = [hadamard(hadamard(part, size, -1), size, -2) for part in observer.parts]
    rotated.amax = None
    return rotated
