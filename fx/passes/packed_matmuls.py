"""Fuse the dequantization of a weight into its matmul: `linear(x, dequantize_mx(weight))` becomes `linear_mx`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import (
    Dequantize,
    args_of,
    dtype_of,
    function_of,
    make_positional,
    named_args,
    node_arg,
    operator_of,
    shape_of,
)
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.fx.graph.views import REORDERING
from pt2mx.ops import linear


@dataclass(frozen=True)
class Matmul:
    """The positions of a matmul's tensors among its arguments, and the operator that computes it with a packed weight.

    Args:
        x, weight, third: positions of the arguments; `third` is the bias, or the offsets of the groups.
        dims: the dimensions of the packed weight in the matmul's order; blocks run along the packed weight's last
            dimension.
        packed: the operator that takes (x, codes, scales, third, element, block size, *others).
        others: here the rotation of a `linear_mx`.
    """

    x: int
    weight: int
    third: int | None
    dims: tuple[int, ...]
    packed: torch._ops.OpOverload = linear.linear_mx
    others: tuple[int, ...] = (0,)


#: name of a matmul operator -> its arguments. The packed weight is (N, K), for grouped matmuls (E, N, K). transformers
#: exports its own operator for experts that are not in bfloat16
MATMULS = {
    "aten.linear.default": Matmul(0, 1, 2, (0, 1)),
    "aten.matmul.default": Matmul(0, 1, None, (1, 0)),
    "aten.mm.default": Matmul(0, 1, None, (1, 0)),
    "aten.addmm.default": Matmul(1, 2, 0, (1, 0)),
    "aten._grouped_mm.default": Matmul(0, 1, 2, (0, 2, 1), linear.grouped_linear_mx, ()),
    "transformers.grouped_mm_fallback.default": Matmul(0, 1, 2, (0, 2, 1), linear.grouped_linear_mx, ()),
}


@dataclass(frozen=True)
class Weight:
    """The weight of a matmul: its `dequantize_mx` node, the dimension along which its blocks run, and its dimensions in
    the matmul's order."""

    dequantize: Node
    axis: int
    dims: tuple[int, ...]


@graph_pass(Dequantize)
def use_packed_weights(model: GraphModule) -> None:
    """Replace matmuls by operators that read the codes of their weight.

    The blocks must run along the reduced dimension, the last one of the codes (see `make_weights_k_major`), and x,
    weight, bias and result must have one dtype. Other matmuls and convolutions keep their dequantized weight, which
    Inductor computes at each call.
    """
    written = written_nodes(model.graph)
    for node, matmul, weight in weights_of_matmuls(model):
        call = Dequantize.expect(weight.dequantize)
        blocks_last = weight.dims == matmul.dims and weight.axis == len(weight.dims) - 1
        if not (blocks_last and written.isdisjoint((weight.dequantize, call.codes, call.scale))):
            continue
        x, third = args_of(node)[matmul.x], argument(node, matmul.third)
        with model.graph.inserting_before(node):
            args = (x, call.codes, call.scale, third, call.element, call.block_size, *matmul.others)
            packed = model.graph.call_function(matmul.packed, args)
        packed.meta.update(node.meta)
        node.replace_all_uses_with(packed)
        erase_unused(node)


def weights_of_matmuls(model: GraphModule) -> list[tuple[Node, Matmul, Weight]]:
    """Return the calls of `MATMULS` with a dequantized weight that an operator on packed weights could compute."""
    matmuls = []
    for node in model.graph.nodes:
        matmul = MATMULS.get(str(node.target))
        if matmul is None or not _is_plain(node, matmul):
            continue
        weight = _weight(node_arg(node, matmul.weight))
        if weight is not None and _matches_packed_operator(node, matmul, weight):
            matmuls.append((node, matmul, weight))
    return matmuls


def argument(node: Node, position: int | None) -> Any:
    """Return the positional argument of a call; None where the call has fewer."""
    return node.args[position] if position is not None and position < len(node.args) else None


def _is_plain(node: Node, matmul: Matmul) -> bool:
    """Return whether all arguments that the packed operator lacks have their default values."""
    make_positional(node)
    taken = (matmul.x, matmul.weight, matmul.third)
    others = [a for i, a in enumerate(operator_of(node)._schema.arguments) if i not in taken]
    args = named_args(node)
    return all(args[a.name] == a.default_value for a in others)


def _weight(node: Node) -> Weight | None:
    """Return the weight that a node computes, if the node only permutes a dequantized weight."""
    chain = []
    while node.target in REORDERING:
        chain.append(node)
        node = node_arg(node)
    call, shape = Dequantize.of(node), shape_of(node)
    if call is None or shape is None:
        return None
    sizes = torch.empty(tuple(range(len(shape))), device="meta")  # each size is the number of its dimension
    for reordering in reversed(chain):
        sizes = function_of(reordering)(sizes, *reordering.args[1:], **reordering.kwargs)
    return Weight(node, call.axis % len(shape), tuple(sizes.shape))


def _matches_packed_operator(node: Node, matmul: Matmul, weight: Weight) -> bool:
    """Return whether the packed operator takes the dtypes and shapes of a matmul.

    Inside autocast a matmul may have another dtype than its operands. Such a matmul stays, because `merge_linears`
    could merge it with one outside of autocast.
    """
    dtype = Dequantize.expect(weight.dequantize).dtype
    x, third = args_of(node)[matmul.x], argument(node, matmul.third)
    if any(dtype_of(n) != dtype for n in (node, x)):
        return False
    if matmul.packed is linear.grouped_linear_mx:
        return dtype_of(third) == torch.int32 and len(shape_of(x) or ()) == 2
    return third is None or (dtype_of(third), shape_of(third)) == (dtype, (shape_of(node) or ())[-1:])
