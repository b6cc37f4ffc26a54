"""Products in rotated coordinates: outliers of inputs and weights are shared out among 32 neighbours.

Both factors are rotated along the dimension that the product reduces, which leaves the product as it is: the weight
now, the input by a node of the graph (`torch.ops.pt2mx.hadamard`), one for all the products that read it. Queries and
keys are both rotated by nodes.
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
from pt2mx.pt2e.optimize.equivalent_transforms import BITS, Inputs, can_change_coordinates, fixed_nodes, read_instead
from pt2mx.pt2e.optimize.observers import MXHessianObserver
from pt2mx.pt2e.optimize.targets import Reader, Site, quantized_inputs, set_weight
from pt2mx.pt2e.torchao_pt2e import Quantizer
from pt2mx.spec import MXSpec

#: values that are rotated together at least
_SMALLEST = 4


@torch.no_grad()
def rotate_products(model: GraphModule, sites: list[Site], inputs: Inputs, options: Rotation) -> None:
    """Rotate the weights that linear layers and matrix products alone read, and their inputs. Changes `model`, and
    replaces the observers of the rotated inputs."""
    fixed = fixed_nodes(model)
    rotated: dict[tuple[Node, int], list[tuple[Node, int]]] = {}
    # an observer that nothing else holds any more is gone: one sum of many is there twice, not all
    seen: WeakKeyDictionary[MXHessianObserver, dict[int, MXHessianObserver]] = WeakKeyDictionary()
    for site in sites:
        if size := _size(site, fixed, inputs, options):
            value = hadamard(site.value, size, site.readers[0].spec.axis)
            if not value.isfinite().all() or not all(_holds_rotated(reader, inputs, size) for reader in site.readers):
                continue
            set_weight(model, site, value)
            for reader in site.readers:
                if reader.product is not None:
                    rotated.setdefault((reader.product.source, size), []).append((reader.node, reader.product.position))
                if (observer := inputs.get(reader.node)) is not None:
                    by_size = seen.setdefault(observer, {})
                    by_size[size] = by_size.get(size) or _rotated(observer, size)
                    inputs[reader.node] = by_size[size]
    for (source, size), readers in rotated.items():
        read_instead(readers, hadamard, (source, size))


def rotate_attention(model: GraphModule, quantizer: Quantizer, options: Rotation) -> None:
    """Rotate queries and keys, and other factors that a product computes and quantizes both along the dimension that it
    reduces. Changes `model`."""
    written = written_in(model)
    quantized = {(n, tensor): spec for n, tensor, role, spec in quantized_inputs(model, quantizer) if role != "weight"}
    for node in [node for graph in graph_modules(model) for node in graph.graph.nodes]:
        factors = list(zip(args_of(node), _TWO_FACTORS.get(node.target, ()), strict=False))
        sizes = {_length(x, axis, quantized.get((node, x))) for x, axis in factors if x not in written}
        size = _largest(sizes.pop(), options) if len(sizes) == 1 else 0
        if size and len({x for x, _ in factors} - written) == 2:
            for i, (x, axis) in enumerate(factors):
                read_instead([(node, i)], hadamard, (x, size) if axis == -1 else (x, size, axis))


#: operator -> the dimensions of its first two arguments, counted from the end, that it reduces
_TWO_FACTORS: dict[object, tuple[int, int]] = {
    torch.ops.aten.scaled_dot_product_attention.default: (-1, -1),
    torch.ops.aten.matmul.default: (-1, -2),
    torch.ops.aten.bmm.default: (-1, -2),
}


def _length(x: Node, axis: int, spec: MXSpec | None) -> int:
    """The length of a factor along the dimension that is reduced; 0 where rotating it would gain nothing."""
    shape = shape_of(x) or ()
    if spec is None or spec.element.bits >= BITS or x.target is hadamard or spec.axis != axis + len(shape):
        return 0
    length = shape[axis]
    return length if isinstance(length, int) else 0


def _size(site: Site, fixed: set[Node], inputs: Inputs, options: Rotation) -> int:
    """The values that are rotated together; 0 for a weight that stays."""
    products = can_change_coordinates(site, fixed)
    if not products or site.readers[0].spec.element.bits >= BITS:
        return 0
    if any(p.source.target is hadamard for p in products):  # rotated again, they would be as before
        return 0
    axis = products[0].layout.axis
    if {reader.spec.axis for reader in site.readers} != {axis}:
        return 0
    size = _largest(site.value.shape[axis], options)
    parts = [part for reader in site.readers if reader.node in inputs for part in inputs[reader.node].parts]
    return size if size and all(part.shape[-1] % size == 0 for part in parts) else 0


def _holds_rotated(reader: Reader, inputs: Inputs, size: int) -> bool:
    """True if no block of the inputs that calibration saw overflows when it is rotated: neither its sums, in float32,
    nor its result, in the inputs' dtype."""
    observer = inputs.get(reader.node)
    if observer is None or observer.amax is None or reader.product is None:
        return True
    sums = observer.amax.float().unflatten(-1, (-1, size)).sum(-1)
    largest = torch.finfo(dtype_of(reader.product.source) or torch.float32).max
    return bool((sums.isfinite() & (sums * size**-0.5 <= largest)).all())


def _largest(values: int, options: Rotation) -> int:
    """The largest power of two that divides a number of values, up to that of the options; 0 if it is too small."""
    size = min(options.size, values & -values)
    return size if size >= _SMALLEST else 0


def _rotated(observer: MXHessianObserver, size: int) -> MXHessianObserver:
    """The observer of an input that is rotated; of its largest values it knows nothing."""
    rotated = copy.copy(observer)
    rotated.parts = [hadamard(hadamard(part, size, -1), size, -2) for part in observer.parts]
    rotated.amax = None
    return rotated
