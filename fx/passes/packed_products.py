"""Products with packed weights: `linear(x, dequantize_mx(weight))` becomes `linear_mx(x, weight)`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import Dequantize, dtype_of, make_positional, shape_of
from pt2mx.fx.graph.tensors import erase_unread
from pt2mx.fx.graph.views import REORDERING
from pt2mx.ops import linear

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """Where a product has its tensors, and what computes it with a packed weight.

    Args:
        x, weight, third: positions of the arguments; the third is the bias, or the ends of the groups.
        dims: the dimensions of the packed weight, whose blocks run along the last, in the order in which the product
            has them.
        packed: the operator that takes (x, codes, scales, third, element, block size).
    """

    x: int
    weight: int
    third: int | None
    dims: tuple[int, ...]
    packed: torch._ops.OpOverload = linear.linear_mx


#: a product -> its arguments; the weight is packed (N, K), that of groups (E, N, K)
PRODUCTS = {
    aten.linear.default: Product(0, 1, 2, (0, 1)),
    aten.matmul.default: Product(0, 1, None, (1, 0)),
    aten.mm.default: Product(0, 1, None, (1, 0)),
    aten.addmm.default: Product(1, 2, 0, (1, 0)),
    aten._grouped_mm.default: Product(0, 1, 2, (0, 2, 1), linear.grouped_linear_mx),
}


@dataclass(frozen=True)
class Weight:
    """The weight of a product: the `dequantize_mx` that gives it, the dimension along which its blocks run, and its
    dimensions in the order in which the product has them."""

    dequantize: Node
    axis: int
    dims: tuple[int, ...]


@GraphPass
def use_packed_weights(model: GraphModule) -> None:
    """Let products read the codes of their weight, where its blocks run along the dimension that they reduce and along
    the last one of the codes (see `make_weights_k_major`), and x, weight, bias and result have one dtype.

    Other products, convolutions among them, keep their dequantized weight, which Inductor computes at each call.
    """
    written = written_nodes(model.graph)
    for node, product, weight in weights_of_products(model):
        data, scale, element, block_size, *_ = Dequantize.of(weight.dequantize)
        blocks_last = weight.dims == product.dims and weight.axis == len(weight.dims) - 1
        if not (blocks_last and written.isdisjoint((weight.dequantize, data, scale))):
            continue
        third = argument(node, product.third)
        with model.graph.inserting_before(node):
            packed = model.graph.call_function(
                product.packed, (node.args[product.x], data, scale, third, element, block_size)
            )
        packed.meta.update(node.meta)
        node.replace_all_uses_with(packed)
        erase_unread(node)


def weights_of_products(model: GraphModule) -> list[tuple[Node, Product, Weight]]:
    """The products of `PRODUCTS` by a dequantized weight that an operator on packed weights could compute."""
    found = []
    for node in model.graph.nodes:
        product = PRODUCTS.get(node.target)
        if product is None or not _is_plain(node, product):
            continue
        weight = _weight(node.args[product.weight])
        if weight is not None and _fits(node, product, weight):
            found.append((node, product, weight))
    return found


def argument(node: Node, position: int | None) -> object:
    return node.args[position] if position is not None and position < len(node.args) else None


def _is_plain(node: Node, product: Product) -> bool:
    """Whether arguments that the packed form does not have are at their defaults."""
    make_positional(node)
    own = (product.x, product.weight, product.third)
    others = [a for i, a in enumerate(node.target._schema.arguments) if i not in own]
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)} | node.kwargs
    return all(given.get(a.name, a.default_value) == a.default_value for a in others)


def _weight(node: Node) -> Weight | None:
    chain = []
    while node.target in REORDERING:
        chain.append(node)
        node = node.args[0]
    if node.target is not ops.dequantize_mx or shape_of(node) is None:
        return None
    rank = len(shape_of(node))
    sizes = torch.empty(tuple(range(rank)), device="meta")  # whose sizes are the numbers of its dimensions
    for reordering in reversed(chain):
        sizes = reordering.target(sizes, *reordering.args[1:], **reordering.kwargs)
    return Weight(node, Dequantize.of(node).axis % rank, tuple(sizes.shape))


def _fits(node: Node, product: Product, weight: Weight) -> bool:
    """Inside autocast a product has another dtype than its operands: it stays, since what runs outside could be joined
    with it."""
    dtype, third = Dequantize.of(weight.dequantize).dtype, argument(node, product.third)
    if any(dtype_of(n) != dtype for n in (node, node.args[product.x])):
        return False
    if product.packed is linear.grouped_linear_mx:
        return dtype_of(third) == torch.int32 and len(shape_of(node.args[product.x])) == 2
    return third is None or (dtype_of(third), shape_of(third)) == (dtype, shape_of(node)[-1:])
