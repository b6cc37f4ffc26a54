"""Choose the block axis of an attention's values.

By the dot product of the specification (OCP MX v1.0, section 6.1) blocks run along the dimension that a matmul reduces,
for values the key length. Then a block holds several tokens, and masked, padded and later tokens influence its scale:
in a causal model the last token would change the results of the first ones, and the old content of a cache would change
a new prompt. So by default the blocks of values run along the head dimension, within one token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from pt2mx.fx.graph.views import is_view
from pt2mx.pt2e.quantizer.operators import Operand, argument_of
from pt2mx.pt2e.quantizer.reduction_axes import einsum_free_axis

aten = torch.ops.aten

#: the choices for the blocks of an attention's values, the field `value_blocks` of a config
VALUE_BLOCKS = ("head_dim", "key_length")

#: the remark of a report on the latter
REMARK = "value in blocks along the key length: masked, padded and later tokens change a block's scale"

_SOFTMAX = frozenset({
    "softmax", "_softmax", "special_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "special_log_softmax",
})  # fmt: skip
#: apart from views, operators after which probabilities are still probabilities: casts, copies, masks, top-k, dropout
_PASSING = frozenset({
    "_to_copy", "type_as", "clone", "dropout", "native_dropout", "feature_dropout", "alpha_dropout", "mul", "div",
    "where", "masked_fill", "nan_to_num", "copy", "lift_fresh_copy", "reshape", "cat", "constant_pad_nd", "pad",
    "tril", "triu", "topk", "exp", "scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "index_put",
    "index_fill", "masked_scatter",
})  # fmt: skip


def along_head_dim(node: Node, operands: tuple[Operand, ...], constants: set[Node]) -> tuple[Operand, ...]:
    """Return the operands of a call, with the blocks of attention values along the head dimension.

    Values are those of a fused attention, and the factor that probabilities are multiplied with in a matmul of an
    unfused one. Constant factors keep their axis: they hold no tokens.
    """
    return tuple(
        operand if axis is None else dataclasses.replace(operand, axis=axis)
        for operand, axis in ((operand, _head_axis(node, operand, operands, constants)) for operand in operands)
    )


def _head_axis(node: Node, operand: Operand, operands: tuple[Operand, ...], constants: set[Node]) -> int | None:
    if operand.name == "value":
        return -1
    if operand.role != "operand" or (argument := argument_of(node, operand)) is None or argument in constants:
        return None
    factors = [argument_of(node, other) for other in operands if other.role == "operand" and other is not operand]
    if not any(factor is not None and _are_probabilities(factor) for factor in factors) or _are_probabilities(argument):
        return None
    if operand.item is not None:  # of an einsum, whose factors are a list
        return einsum_free_axis(node, operand.item)
    value = argument.meta.get("val")
    is_matrix = isinstance(value, torch.Tensor) and value.dim() > 1
    return {-1: -2, -2: -1}.get(operand.axis) if is_matrix else None


def _are_probabilities(node: Node) -> bool:
    """Return True for the result of a softmax, also after casts, masks, dropout and views."""
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        name = getattr(getattr(current.target, "_overloadpacket", current.target), "__name__", "")
        if name in _SOFTMAX:
            return True
        if name in _PASSING or is_view(current):
            pending.extend(current.all_input_nodes)
    return False
