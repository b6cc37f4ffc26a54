"""The operators that are quantized: which arguments, and along which dimension each is blocked.

A new operator is a new row. The block axis is the dimension that the operator reduces, so that a scale can be taken out
of each partial sum (OCP MX v1.0, section 6.1).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from pt2mx import ops

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """One argument of an operator: its position, its role (a field of the config) and its block axis.

    The role "operand" is "weight" for a constant tensor and "activation" for a computed one.
    """

    position: int
    role: str
    axis: int


_LINEAR = (Operand(0, "activation", -1), Operand(1, "weight", -1), Operand(2, "bias", -1))
_MATMUL = (Operand(0, "operand", -1), Operand(1, "operand", -2))


def _conv(dimensions: int) -> tuple[Operand, ...]:
    # the channel, counted from the end: a convolution's input may come without a batch dimension
    return Operand(0, "activation", -1 - dimensions), Operand(1, "weight", 1), Operand(2, "bias", -1)


#: operator -> the operands that are quantized
OPERATORS: dict[torch._ops.OpOverload, tuple[Operand, ...]] = {
    aten.linear.default: _LINEAR,
    # addmm(bias, x, weight): Hugging Face's Conv1D among others, whose weight is (in, out)
    aten.addmm.default: (Operand(1, "operand", -1), Operand(2, "operand", -2), Operand(0, "bias", -1)),
    aten.mm.default: _MATMUL,
    aten.bmm.default: _MATMUL,
    aten.matmul.default: _MATMUL,
    aten.conv1d.default: _conv(1),
    aten.conv1d.padding: _conv(1),
    aten.conv2d.default: _conv(2),
    aten.conv2d.padding: _conv(2),
    aten.conv3d.default: _conv(3),
    aten.conv3d.padding: _conv(3),
    # query and key are reduced along the head dimension, value along the key length
    aten.scaled_dot_product_attention.default: (
        Operand(0, "activation", -1),
        Operand(1, "activation", -1),
        Operand(2, "activation", -2),
    ),
    # gathers rows; blocks run along them, so that a row can be gathered before it is dequantized
    aten.embedding.default: (Operand(0, "weight", -1),),
}


def operator_name(target: torch._ops.OpOverload) -> str:
    """`aten.linear` for `torch.ops.aten.linear.default`; other overloads keep their name."""
    name = f"{target.namespace}.{target._schema.name.split('::')[-1]}"
    return name if target._overloadname == "default" else f"{name}.{target._overloadname}"


def operand_node(node: Node, operand: Operand) -> Node | None:
    """The node that feeds `operand`, None where the argument is absent."""
    argument = node.args[operand.position] if operand.position < len(node.args) else None
    return argument if isinstance(argument, Node) else None


def role_of(operand: Operand, argument: Node, constants: set[Node]) -> str:
    """The config field that holds the operand's spec; `constants` are the constant nodes of the graph."""
    if operand.role != "operand":
        return operand.role
    if argument.op == "call_module":  # an observer's call
        argument = argument.args[0]
    elif argument.target is ops.dequantize_mx:  # what became of it: packed buffers, or the items of a pair
        argument = argument.args[0]
        if argument.target is operator.getitem:
            argument = argument.args[0].args[0]
    return "weight" if argument in constants else "activation"
