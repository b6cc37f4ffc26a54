"""Products that only a setting of their own quantizes: the global one leaves them in high precision.

Angles: random Fourier features (Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions in Low
Dimensional Domains", 2020) are the sine and cosine of coordinates times a constant matrix. An angle of many turns that
is off by a few percent points anywhere, and the matrix has a few hundred values.

Factors of a weight: a product of constants is computed at conversion where weights are made of it (a low-rank update).
Quantizing its factors too would add their noise, and save nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from pt2mx.fx.graph.attributes import attribute_of, model_of
from pt2mx.fx.graph.views import is_view
from pt2mx.pt2e.quantizer.operators import OPERANDS, argument_of, operands_of, operator_name

#: at most so many coordinates: a point in space and time, the corners of a box
_COORDINATES = 4

#: operators behind which an angle is still one, beside views: casts, copies, factors, shifts
_PASSING = frozenset({"_to_copy", "type_as", "clone", "mul", "div", "add", "sub", "neg", "reshape", "cat", "stack"})
_PERIODIC = frozenset({"sin", "cos"})


def left_alone(node: Node, constants: set[Node]) -> str | None:
    """Return why the global setting leaves a product in high precision; None where it does not.

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
                return f"angles: sine and cosine read the product with the constant {argument.name}"
    return None


def _is_buffer(node: Node) -> bool:
    """True of a tensor of the model that no training changes."""
    return node.op == "get_attr" and not isinstance(attribute_of(model_of(node.graph), node), torch.nn.Parameter)


def _makes_weights(node: Node, constants: set[Node]) -> bool:
    """True if quantizable operators alone read a constant, or what is computed from it alone."""
    return bool(node.users) and all(
        _makes_weights(user, constants) if user in constants else operator_name(user.target) in OPERANDS
        for user in node.users
    )


def _read_by(node: Node) -> set[str]:
    """The names of the operators that read a value, as it is or scaled, shifted, and seen in other shapes."""
    seen, pending, found = {node}, [node], set()
    while pending:
        for user in pending.pop().users:
            name = getattr(getattr(user.target, "_overloadpacket", user.target), "__name__", "")
            found.add(name)
            if user not in seen and (name in _PASSING or is_view(user)):
                seen.add(user)
                pending.append(user)
    return found
