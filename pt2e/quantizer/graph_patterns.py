"""Recognize patterns of a graph that change how an operator is quantized.

Attention values: by the dot product of the specification (OCP MX v1.0, section 6.1) blocks run along the dimension that
a matmul reduces, for values the key length. Then a block holds several tokens, and masked, padded and later tokens
influence its scale: in a causal model the last token would change the results of the first ones, and the old content of
a cache would change a new prompt. So by default the blocks of values run along the head dimension, within one token.

Two kinds of matmuls stay in high precision under the global setting; a more specific setting quantizes them.

Angles: random Fourier features (Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions in Low
Dimensional Domains", 2020) are the sine and cosine of coordinates times a constant matrix. An error of a few percent in
an angle of many turns gives a random result, and the matrix has only a few hundred values.

Factors of a weight: a matmul of constants that computes a weight (a low-rank update) runs at conversion. Quantizing its
factors too would add their noise, and save nothing.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from pt2mx.fx.graph.aliasing import is_view
from pt2mx.fx.graph.node import attribute_of, model_of
from pt2mx.pt2e.quantizer.operators import OPERANDS, Operand, operator_name
from pt2mx.pt2e.quantizer.reduction_axes import einsum_free_axis

#: the operands of a call, each with its argument (`arguments_of`)
Arguments = list[tuple[Operand, Node | None]]

#: the choices for the blocks of an attention's values, the field `value_blocks` of a config
VALUE_BLOCKS = ("head_dim", "key_length")

#: the remark of a report on the latter
REMARK = "value in blocks along the key length: masked, padded and later tokens change a block's scale"

_SOFTMAX = frozenset({
    "softmax", "_softmax", "special_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "special_log_softmax",
})  # fmt: skip
#: apart from views, operators after which probabilities are still probabilities: casts, copies, masks, top-k, dropout
_KEEPS_PROBABILITIES = frozenset({
    "_to_copy", "type_as", "clone", "dropout", "native_dropout", "feature_dropout", "alpha_dropout", "mul", "div",
    "where", "masked_fill", "nan_to_num", "copy", "lift_fresh_copy", "reshape", "cat", "constant_pad_nd", "pad",
    "tril", "triu", "topk", "exp", "scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "index_put",
    "index_fill", "masked_scatter",
})  # fmt: skip

#: most coordinates of a point: space and time, or the corners of a box
_COORDINATES = 4
#: apart from views, operators after which an angle is still one: casts, copies, scaling, shifting
_KEEPS_ANGLES = frozenset({
    "_to_copy", "type_as", "clone", "mul", "div", "add", "sub", "neg", "reshape", "cat", "stack",
})  # fmt: skip
_PERIODIC = frozenset({"sin", "cos"})


def along_head_dim(node: Node, arguments: Arguments, constants: set[Node]) -> Arguments:
    """Return the operands of a call with their arguments, with the blocks of attention values along the head dimension.

    Attention values are the values of a fused attention, and the other factor of the probabilities in an unfused one.
    Constant factors keep their axis: they hold no tokens.
    """
    moved: Arguments = []
    for operand, argument in arguments:
        axis = _head_axis(node, operand, argument, arguments, constants)
        moved.append((operand if axis is None else dataclasses.replace(operand, axis=axis), argument))
    return moved


def _head_axis(
    node: Node, operand: Operand, argument: Node | None, arguments: Arguments, constants: set[Node]
) -> int | None:
    if operand.name == "value":
        return -1
    if operand.role != "operand" or argument is None or argument in constants:
        return None
    factors = [factor for other, factor in arguments if other.role == "operand" and other is not operand]
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
        name = _packet_name(current)
        if name in _SOFTMAX:
            return True
        if name in _KEEPS_PROBABILITIES or is_view(current):
            pending.extend(current.all_input_nodes)
    return False


def default_exclusion(node: Node, arguments: Arguments, constants: set[Node]) -> str | None:
    """Return why the global setting leaves a matmul in high precision; None where it quantizes it.

    Args:
        node: a call of a quantizable operator.
        arguments: its operands with their arguments.
        constants: the constant nodes of the graph.
    """
    if not constants:
        return None
    factors = [operand for operand, argument in arguments if operand.role == "operand" and argument is not None]
    if factors and node in constants and _makes_weights(node, constants):
        return "a factor of a weight, which is quantized as a whole"
    for operand, argument in arguments:
        if argument is None or argument not in constants:
            continue
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        length = value.shape[max(operand.axis, -value.dim())]
        if isinstance(length, int) and length <= _COORDINATES and (operand.role == "operand" or _is_buffer(argument)):
            if _read_by(node) >= _PERIODIC:
                return f"angles: sine and cosine use the matmul with the constant {argument.name}"
    return None


def _is_buffer(node: Node) -> bool:
    """Return True for a tensor of the model that training does not change."""
    return node.op == "get_attr" and not isinstance(attribute_of(model_of(node.graph), node), torch.nn.Parameter)


def _makes_weights(node: Node, constants: set[Node]) -> bool:
    """Return True if a constant, and what is computed from it alone, is used by quantizable operators only."""
    return bool(node.users) and all(
        _makes_weights(user, constants) if user in constants else operator_name(user.target) in OPERANDS
        for user in node.users
    )


def _read_by(node: Node) -> set[str]:
    """Return the names of the operators that use a value, directly or after scaling, shifting and views."""
    seen, pending, names = {node}, [node], set()
    while pending:
        for user in pending.pop().users:
            name = _packet_name(user)
            names.add(name)
            if user not in seen and (name in _KEEPS_ANGLES or is_view(user)):
                seen.add(user)
                pending.append(user)
    return names


def _packet_name(node: Node) -> str:
    """Return the name of an operator without namespace and overload."""
    return getattr(getattr(node.target, "_overloadpacket", node.target), "__name__", "")
