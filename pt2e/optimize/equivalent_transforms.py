"""Products in other coordinates, in common to smoothing and rotation: both factors change, and the product stays.

The weight is changed now. The input is by a new node of the graph, one for all the products that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.higher_order_ops import captured_operands, written_in
from pt2mx.fx.graph.node import set_value
from pt2mx.fx.graph.qdq import PROVENANCE_KEYS
from pt2mx.pt2e.optimize.matmul_views import Product, reads_rows
from pt2mx.pt2e.optimize.observers import MXHessianObserver
from pt2mx.pt2e.optimize.targets import Site, is_read_by_these_alone, why_not_rounded

#: bits of an element from which on rounding alone loses little, and other coordinates gain nothing
BITS = 8

#: reader of a weight -> what calibration has shown of its input
Inputs = dict[Node, MXHessianObserver]


def first_of(nodes: Iterable[Node]) -> Node:
    """The one of some nodes that runs first."""
    some = set(nodes)
    return next(node for node in next(iter(some)).graph.nodes if node in some)


def read_instead(readers: Sequence[tuple[Node, int]], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Make readers, each at a position of its arguments, read a new node: a call of `target`, before the first of them.
    They may go on to read its source elsewhere, as a bias."""
    first = first_of(reader for reader, _ in readers)
    with first.graph.inserting_before(first):
        new = first.graph.call_function(target, args)
    new.meta.update({key: first.meta[key] for key in PROVENANCE_KEYS if key in first.meta})
    set_value(new)
    for reader, position in readers:
        reader.update_arg(position, new)


def fixed_nodes(model: GraphModule) -> set[Node]:
    """The nodes of the graphs of a model that are written, and the placeholders of graphs inside that are not the same
    in each call: what is done to one weight would be to the products of another."""
    written = written_in(model)
    return written | {node for node, held in captured_operands(model).items() if len(set(map(id, held))) > 1}


def can_change_coordinates(site: Site, fixed: set[Node]) -> list[Product]:
    """The products of a weight, where the columns of all their factors can be changed and the products stay: matrix
    products of rows, which alone read the weight; none elsewhere."""
    products = [reader.product for reader in site.readers if reader.product is not None]
    if len(products) < len(site.readers) or not is_read_by_these_alone(site) or why_not_rounded(site):
        return []
    if any(not reads_rows(p) or p.source in fixed for p in products):
        return []
    if any(reader.weight in fixed for reader in site.readers):
        return []
    return products if len({p.layout.axis for p in products}) == 1 else []
