"""Products in rotated coordinates: outliers of inputs and weights are shared out among 32 neighbours.

Both factors are rotated along the dimension that the product reduces, which leaves the product as it is: the weight
now, the input by a node of the graph (`torch.ops.pt2mx.hadamard`), one for all the products that read it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import set_value
from pt2mx.fx.graph.qdq import PROVENANCE_KEYS
from pt2mx.ops.hadamard import hadamard, rotate
from pt2mx.pt2e.optimize.layouts import reads_rows
from pt2mx.pt2e.optimize.sites import Site, is_read_by_these_alone, set_weight, why_not_rounded

#: bits of an element from which on rounding alone loses little, and rotation gains nothing
_BITS = 8
#: values that are rotated together at most, and at least
_LARGEST, _SMALLEST = 32, 4


@torch.no_grad()
def rotate_products(model: GraphModule, sites: list[Site]) -> None:
    """Rotate the weights that linear layers and matrix products alone read, and their inputs. Changes `model`."""
    order = {node: i for i, node in enumerate(model.graph.nodes)}
    written = written_nodes(model.graph)
    rotated: dict[tuple[Node, int], list[tuple[Node, int]]] = {}
    for site in sites:
        if size := _size(site, written):
            set_weight(model, site, rotate(site.value, size, site.readers[0].spec.axis))
            for reader in site.readers:
                if reader.product is not None:
                    rotated.setdefault((reader.product.source, size), []).append((reader.node, reader.product.position))
    for (source, size), readers in rotated.items():
        first = min((product for product, _ in readers), key=order.__getitem__)
        with model.graph.inserting_before(first):
            node = model.graph.call_function(hadamard, (source, size))
        node.meta.update({key: first.meta[key] for key in PROVENANCE_KEYS if key in first.meta})
        set_value(node)
        for product, position in readers:  # which may read the tensor elsewhere too, as a bias
            product.update_arg(position, node)


def _size(site: Site, written: set[Node]) -> int:
    """The values that are rotated together: the largest power of two that divides them, up to 32; 0 for a weight that
    stays."""
    products = [reader.product for reader in site.readers]
    if not is_read_by_these_alone(site) or why_not_rounded(site) or site.readers[0].spec.element.bits >= _BITS:
        return 0
    if any(p is None or not reads_rows(p) or p.source in written or p.source is site.node for p in products):
        return 0
    if any(p.source.target is hadamard for p in products if p is not None):  # rotated again, they would be as before
        return 0
    axes = {reader.spec.axis for reader in site.readers} | {p.layout.axis for p in products if p is not None}
    if len(axes) > 1:
        return 0
    values = site.value.shape[axes.pop()]
    size = min(_LARGEST, values & -values)
    return size if size >= _SMALLEST else 0
