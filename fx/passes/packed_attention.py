"""Fuse the dequantization of a key/value cache into attention: `scaled_dot_product_attention` becomes `attention_mx`,
which reads the codes."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import Writes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import Dequantize, dtype_of, named_args, node_arg, shape_of, value_of
from pt2mx.fx.graph.tensors import erase_unused
from pt2mx.ops.attention import attention_mx

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


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
        if writes and any(writes.between(one, node, (one, *Dequantize.expect(one).args[:2])) for one in pair):
            continue
        args, (key, value) = named_args(node), map(Dequantize.expect, pair)
        width = value_of(pair[1]).shape[3]
        packed = key.codes, key.scale, value.codes, value.scale, key.element, key.block_size, width
        with model.graph.inserting_before(node):
            operands = (args["query"], *packed, args["attn_mask"], args["scale"])
            attention = model.graph.call_function(attention_mx, operands)
        attention.meta.update(node.meta)
        node.replace_all_uses_with(attention)
        model.graph.erase_node(node)  # torch.fx keeps attention as impure, because it may have dropout
        for one in dict.fromkeys((args["key"], args["value"])):
            erase_unused(one)


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
    blocks = (key.element, key.block_size, key.axis % 4) == (value.element, value.block_size, 3)
    dtypes = {dtype_of(one) for one in pair} == {dtype_of(query)} and dtype_of(mask) in (None, torch.bool)
    return pair if blocks and value.axis % 4 == 3 and dtypes and _is_grouped(query, *pair) else None


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
