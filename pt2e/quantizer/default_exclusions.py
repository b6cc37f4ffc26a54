"""Matmuls that the global setting leaves in high precision; a more specific setting quantizes them.

Angles: random Fourier features (Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions in Low
Dimensional Domains", 2020) are the sine and cosine of coordinates times a constant matrix. An error of a few percent in
an angle of many turns gives a random result, and the matrix has only a few hundred values.

Factors of a weight: a matmul of constants that computes a weight (a low-rank update) runs at conversion. Quantizing its
factors too would add their noise, and save nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from pt2mx.fx.graph.attributes import attribute_of, model_of
from pt2mx.fx.graph.views import is_view
from pt2mx.pt2e.quantizer.operators import OPERANDS, argument_of, operands_of, operator_name

#: most coordinates of a point: space and time, or the corners of a box
_COORDINATES = 4

#: apart from views, operators after which an angle is still one: casts, copies, scaling, shifting
_PASSING = frozenset({"_to_copy", "type_as", "clone", "mul", "div", "add", "sub", "neg", "reshape", "cat", "stack"})
_PERIODIC = frozenset({"sin", "cos"})


def default_exclusion(node: Node, constants: set[Node]) -> str | None:
    """Return why the global setting leaves a matmul in high precision; None where it quantizes it.

    Args:
        node: a call of a quantizable operator.
        constants: the constant nodes of the graph.
    """
    if not constants:
        return None
    operands = [(o, argument) for o in operands_of(node) if (argument := argument_of(node, o)) is not None]
    factors = [(operand, argument) for operand, argument in operands if operand.role == "operand"]
    if factors and node in constants and _makes_weights(node, constants):
        return "a factor of a weight, which is quantized as a whole"
    for operand, argument in operands:
        value = argument.meta.get("val") if argument in constants else None
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
            name = getattr(getattr(user.target, "_overloadpacket", user.target), "__name__", "")
            names.add(name)
            if user not in seen and (name in _PASSING or is_view(user)):
                seen.add(user)
                pending.append(user)
    return names
