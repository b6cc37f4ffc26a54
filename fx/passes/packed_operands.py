"""Dequantize packed operands where operators read them: matmuls, embeddings and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.aliasing import Writes, written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.memory_order import REORDERING
from pt2mx.fx.graph.node import (
    AttentionMX,
    Dequantize,
    GroupedLinearMX,
    LinearMX,
    args_of,
    dtype_of,
    function_of,
    inherit_location,
    make_positional,
    named_args,
    node_arg,
    operator_of,
    set_value,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.qdq import SPEC_KEY
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.ops.attention import attention_mx

aten = torch.ops.aten
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Matmul:
    """The positions of a matmul's tensors among its arguments, and the operator that computes it with a packed weight.

    Args:
        x, weight, third: positions of the arguments; `third` is the bias, or the offsets of the groups.
        dims: the dimensions of the packed weight in the matmul's order; blocks run along the packed weight's last
            dimension.
        packed: the operator that computes it.
    """

    x: int
    weight: int
    third: int | None
    dims: tuple[int, ...]
    packed: type[LinearMX | GroupedLinearMX] = LinearMX

    def call(self, x: Node, third: Any, weight: Dequantize) -> LinearMX | GroupedLinearMX:
        """Return the call of `packed` that reads the codes of a weight."""
        if self.packed is GroupedLinearMX:
            return weight.as_call_of(GroupedLinearMX, x=x, offs=third, target_dtype=None)
        return weight.as_call_of(LinearMX, x=x, bias=third, rotation=0, target_dtype=None)


#: name of a matmul operator -> its arguments. The packed weight is (N, K), for grouped matmuls (E, N, K). transformers
#: exports its own operator for experts that are not in bfloat16
MATMULS = {
    "aten.linear.default": Matmul(0, 1, 2, (0, 1)),
    "aten.matmul.default": Matmul(0, 1, None, (1, 0)),
    "aten.mm.default": Matmul(0, 1, None, (1, 0)),
    "aten.addmm.default": Matmul(1, 2, 0, (1, 0)),
    "aten._grouped_mm.default": Matmul(0, 1, 2, (0, 2, 1), GroupedLinearMX),
    "transformers.grouped_mm_fallback.default": Matmul(0, 1, 2, (0, 2, 1), GroupedLinearMX),
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
        new = matmul.call(node_arg(node, matmul.x), argument(node, matmul.third), call)
        with model.graph.inserting_before(node):
            packed = model.graph.call_function(new.overload, new.args)
        replace_node(node, packed)


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
    return Weight(node, call.spec.axis % len(shape), tuple(sizes.shape))


def _matches_packed_operator(node: Node, matmul: Matmul, weight: Weight) -> bool:
    """Return whether the packed operator takes the dtypes and shapes of a matmul.

    Inside autocast a matmul may have another dtype than its operands. Such a matmul stays, because `merge_linears`
    could merge it with one outside of autocast.
    """
    dtype = Dequantize.expect(weight.dequantize).dtype
    x, third = args_of(node)[matmul.x], argument(node, matmul.third)
    if {dtype_of(node), dtype_of(x)} != {dtype}:
        return False
    if matmul.packed is GroupedLinearMX:
        return dtype_of(third) == torch.int32 and len(shape_of(x) or ()) == 2
    return third is None or (dtype_of(third), shape_of(third)) == (dtype, (shape_of(node) or ())[-1:])


def _is_first_index(indices: list[Node | None]) -> bool:
    return len(indices) == 1 and dtype_of(indices[0]) in (torch.int32, torch.int64)


#: operator -> a function of its arguments after the tensor: whether the call gathers along the first dimension
GATHERS: dict[OpOverload, Callable[..., bool]] = {
    aten.embedding.default: lambda indices, *hints: True,
    aten.index_select.default: lambda dim, index: dim == 0,
    aten.index.Tensor: _is_first_index,
}


@graph_pass(tuple(GATHERS), Dequantize)
def use_packed_embeddings(model: GraphModule) -> None:
    """Gather the rows of codes and scales instead of rows of the dequantized weight, and dequantize the result.

    The bits stay the same, because blocks run along the rows. Other users still read the same buffer of codes.
    """
    written = written_nodes(model.graph)
    for gather in [node for node in model.graph.nodes if node.target in GATHERS]:
        dequantize = node_arg(gather)
        call = Dequantize.of(dequantize)
        axis = None if call is None else _gathered_axis(gather, dequantize, call)
        if call is None or axis is None or not written.isdisjoint((dequantize, call.codes, call.scale)):
            continue
        if call.spec.block_rows > 1:
            continue  # rows that are gathered would share no scale
        index_args = gather.args[1:]
        with model.graph.inserting_before(gather):
            codes = model.graph.call_function(function_of(gather), (call.codes, *index_args))
            scale = model.graph.call_function(function_of(gather), (call.scale, *index_args))
            args = call.replace(codes=codes, scale=scale, spec=call.spec.replace(axis=axis)).args
            gathered = model.graph.call_function(ops.dequantize_mx, args)
        for node in (codes, scale):
            inherit_location(node, gather)
            set_value(node)
        replace_node(gather, gathered)
        if SPEC_KEY in dequantize.meta:
            gathered.meta[SPEC_KEY] = dequantize.meta[SPEC_KEY].replace(axis=axis)


def _gathered_axis(gather: Node, dequantize: Node, call: Dequantize) -> int | None:
    """Return the dimension of the gathered rows along which blocks run; None if the gather would split blocks."""
    make_positional(gather)
    shape, gathered = shape_of(dequantize), shape_of(gather)
    if shape is None or gathered is None or gather.kwargs:
        return None
    axis = call.spec.axis % len(shape)
    keeps_blocks = axis != 0 and GATHERS[operator_of(gather)](*gather.args[1:])
    return axis + len(gathered) - len(shape) if keeps_blocks else None


@graph_pass(_ATTENTION, Dequantize)
def use_packed_attention(model: GraphModule) -> None:
    """Replace attention over dequantized keys and values by `attention_mx`.

    Keys and values must have one format, blocks along the head dimension, and the query's dtype. A mask must be
    boolean.
    """
    calls = model.graph.find_nodes(op="call_function", target=_ATTENTION)
    pairs = [(node, pair) for node in calls if (pair := _pair(node))]
    writes = Writes(model.graph) if pairs else None
    for node, pair in pairs:
        args, (key, value) = named_args(node), map(Dequantize.expect, pair)
        read = ((pair[0], key.codes, key.scale), (pair[1], value.codes, value.scale))
        if writes and any(writes.between(tensors[0], node, tensors) for tensors in read):
            continue
        width = value_of(pair[1]).shape[3]
        packed = key.codes, key.scale, value.codes, value.scale, key.spec, width
        of_tensors = key.tensor_scale, value.tensor_scale
        call = AttentionMX(args["query"], *packed, args["attn_mask"], args["scale"], *of_tensors)
        with model.graph.inserting_before(node):
            attention = model.graph.call_function(attention_mx, call.args)
        replace_node(node, attention)


def _pair(node: Node) -> tuple[Node, Node] | None:
    """Return the nodes that dequantize the keys and values of an attention; None if `attention_mx` does not support
    them."""
    args = named_args(node)
    query, mask = args["query"], args["attn_mask"]
    pair = _behind_aliases(args["key"]), _behind_aliases(args["value"])
    if not all(map(Dequantize.of, pair)) or args["is_causal"] or args["dropout_p"]:
        return None
    key, value = map(Dequantize.expect, pair)
    if {len(shape_of(one) or ()) for one in (query, *pair, *(() if mask is None else (mask,)))} != {4}:
        return None
    specs = {call.spec.replace(axis=call.spec.axis % 4) for call in (key, value)}
    blocks = specs == {value.spec.replace(axis=3, block_rows=1)}
    dtypes = {dtype_of(one) for one in pair} == {dtype_of(query)} and dtype_of(mask) in (None, torch.bool)
    return pair if blocks and dtypes and _is_grouped(query, *pair) else None


def _is_grouped(query: Node, keys: Node, values: Node) -> bool:
    """Return whether only the heads of the keys are broadcast, and the number of heads and their width are known."""
    (batch, heads, *_), (*of_keys, _), (*of_values, width) = (shape_of(one) or () for one in (query, keys, values))
    if of_keys != of_values or batch != of_keys[0]:
        return False
    key_heads = of_keys[1]
    if not (isinstance(heads, int) and isinstance(key_heads, int) and isinstance(width, int)):
        return False
    return key_heads > 0 and heads % key_heads == 0


def _behind_aliases(node: Node) -> Node:
    """Return the node behind any aliases."""
    return _behind_aliases(node_arg(node)) if node.target is torch.ops.aten.alias.default else node
