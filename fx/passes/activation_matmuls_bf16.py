"""Compute matmuls of two quantized activations, and attention, exactly by bfloat16 matrix instructions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import Writes, is_view, written_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.memory_order import REORDERING, SPLITTING, accepts_any_order, settle_order
from pt2mx.fx.graph.node import (
    AttentionBfloat16,
    args_of,
    dtype_of,
    inherit_location,
    named_args,
    node_arg,
    set_value,
    shape_of,
    value_of,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.bf16_matmul import QUANTIZED, is_quantized
from pt2mx.kernels.constants import LEAST_ROWS
from pt2mx.kernels.select import supports
from pt2mx.ops.attention import MatmulBfloat16

aten = torch.ops.aten

_MATMULS = (aten.matmul.default, aten.bmm.default, aten.mm.default)
#: dtypes of attention that the pass replaces
_OF_ATTENTION = (torch.float32, torch.bfloat16)


@graph_pass((*_MATMULS, aten.scaled_dot_product_attention.default), QUANTIZED)
def use_bf16_activation_matmuls(model: GraphModule) -> None:
    """Use `matmul_bfloat16` and `attention_bfloat16` where the device has matrix instructions for bfloat16.

    The pass replaces `matmul`, `bmm` and `mm` of two quantized float32 tensors, and attention over a quantized query,
    key and value in float32 or bfloat16.

    It skips small and broadcasting matmuls, attention of a few queries, and memory that the graph writes. On a GPU it
    leaves bfloat16 attention over many keys to torch's kernel. The result of attention is (batch, queries, heads,
    width) in memory, and tensors computed from it may inherit that order.
    """
    written, writes, reordered = written_nodes(model.graph), Writes(model.graph), {}
    for node in list(model.graph.nodes):
        rewrite = _REWRITES.get(node.target)
        call = rewrite(node) if rewrite else None
        if call is None:
            continue
        operands = {name: getattr(call, name) for name in _OPERANDS[type(call)]}
        if not all(_holds_bfloat16(operand, written) for operand in operands.values()):
            continue
        is_attention = isinstance(call, AttentionBfloat16)
        if is_attention and not accepts_any_order(node, writes):
            continue
        with model.graph.inserting_before(node):
            if dtype_of(node) == torch.float32 and supports("quantize activations to bfloat16", value_of(node)):
                call = call.replace(**{name: _cast(operand) for name, operand in operands.items()})
            matmul = model.graph.call_function(call.overload, call.args)
        set_value(matmul)
        if is_attention:
            reordered[matmul] = node.meta["val"]
        replace_node(node, matmul, "val")
    settle_order(model.graph, reordered)


def _cast(operand: Node) -> Node:
    cast = operand.graph.call_function(aten.to.dtype, (operand, torch.bfloat16))
    inherit_location(cast, operand)
    set_value(cast)
    return cast


_Call = MatmulBfloat16[Node] | AttentionBfloat16
_OPERANDS = {MatmulBfloat16: ("x", "y"), AttentionBfloat16: ("query", "key", "value")}


def _matmul(node: Node) -> _Call | None:
    x, y, shape = node_arg(node, 0), node_arg(node, 1), shape_of(node)
    shapes = shape_of(x), shape_of(y)
    if shape is None or None in shapes or any(dtype_of(n) != torch.float32 for n in (node, x, y)):
        return None
    of_x, of_y = shapes
    fits = len(of_x or ()) == len(of_y or ()) >= 2 and (of_x or ())[:-2] == (of_y or ())[:-2]
    if not fits or not supports("multiply activations in bfloat16", value_of(node), (*shape, (of_x or ())[-1])):
        return None
    return MatmulBfloat16(x, y, torch.float32)


def _attention(node: Node) -> _Call | None:
    args = named_args(node)
    operands = args["query"], args["key"], args["value"]
    mask, dtype = args["attn_mask"], dtype_of(node)
    if args["dropout_p"] or dtype not in _OF_ATTENTION or any(dtype_of(n) != dtype for n in operands):
        return None
    (*of_query, width), (*of_key, _), (*of_value, _) = ((shape_of(n) or (0,)) for n in operands)
    if len(of_query) != 3 or of_key != of_value or of_query[0] != of_key[0]:
        return None
    if mask is not None and (args["is_causal"] or dtype_of(mask) not in (torch.bool, dtype)):
        return None
    (_, _, queries), (_, _, keys) = of_query, of_key
    if isinstance(queries, int) and queries < LEAST_ROWS:
        return None
    heads, key_heads = of_query[1], of_key[1]
    if not (isinstance(heads, int) and isinstance(key_heads, int) and key_heads and heads % key_heads == 0):
        return None
    if not supports("attend in bfloat16", value_of(node), (*of_query, keys, width), mask is not None):
        return None
    return AttentionBfloat16(*operands, mask, args["is_causal"], args["scale"], target_dtype=dtype, spec=None)


_REWRITES: dict[object, Callable[[Node], _Call | None]] = {
    **dict.fromkeys(_MATMULS, _matmul),
    aten.scaled_dot_product_attention.default: _attention,
}


def _holds_bfloat16(node: Node, written: set[Node]) -> bool:
    """Return whether a node's values come from a quantization, directly or through views and copies, and nothing writes
    them."""
    while node not in written and args_of(node) and isinstance(node.args[0], Node):
        if is_quantized(node):
            return True
        same = dtype_of(node) == dtype_of(node.args[0])  # a view may change the dtype
        if not same or not (node.target in (*REORDERING, *SPLITTING) or is_view(node)):
            return False
        node = node.args[0]
    return False
