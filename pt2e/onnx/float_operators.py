"""The operators of a float ONNX file that are quantized: which inputs, and along which dimension each is blocked.

A new operator is a new row. The block axis is the dimension that the operator reduces, as in
`pt2mx.pt2e.quantizer.operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import NodeProto, helper

from pt2mx.pt2e.quantizer.operators import ROWS, Operand

aten = torch.ops.aten

#: the operands of a node, or how they follow from its attributes
Row = tuple[Operand, ...] | Callable[[NodeProto], tuple[Operand, ...]]


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node by name, text as `str`."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _gemm(node: NodeProto) -> tuple[Operand, ...]:
    """A (M, K), B (K, N), each maybe transposed."""
    given = attributes_of(node)
    return (
        Operand("input", 0, "operand", -2 if given.get("transA") else -1),
        Operand("other", 1, "operand", -1 if given.get("transB") else -2),
        Operand("bias", 2, "bias", -1),
    )


def _conv(weight_axis: int) -> tuple[Operand, ...]:
    # X (batch, channels, ...), W (out, in / groups, ...), transposed (in, out / groups, ...)
    return Operand("input", 0, "activation", 1), Operand("weight", 1, "weight", weight_axis), _BIAS


def _gather(node: NodeProto) -> tuple[Operand, ...]:
    """The rows of an embedding; a gather along another axis is none."""
    return ROWS if attributes_of(node).get("axis", 0) == 0 else ()


_BIAS = Operand("bias", 2, "bias", -1)
# X (sequence, batch, in), W (directions, gates, in), R (directions, gates, hidden); hidden states stay inside
_RECURRENT = (
    Operand("input", 0, "activation", -1),
    Operand("weight_ih", 1, "weight", -1),
    Operand("weight_hh", 2, "weight", -1),
)

#: operator -> its operands
OPERANDS: dict[str, Row] = {
    "MatMul": (Operand("input", 0, "operand", -1), Operand("other", 1, "operand", -2)),
    "Gemm": _gemm,
    "Conv": _conv(1),
    "ConvTranspose": _conv(0),
    "LSTM": _RECURRENT,
    "GRU": _RECURRENT,
    "RNN": _RECURRENT,
    "Gather": _gather,
}

#: products that stay in high precision, for the report
OTHER_PRODUCTS = ("Attention", "Einsum", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DeformConv")

#: the operator that `set_operator_type` means, where a file does not say from what its node was exported
ATEN = {
    "MatMul": aten.matmul.default,
    "Gemm": aten.linear.default,
    "Conv": aten.convolution.default,
    "ConvTranspose": aten.convolution.default,
    "LSTM": aten.lstm.input,
    "GRU": aten.gru.input,
    "RNN": aten.rnn_tanh.input,
    "Gather": aten.embedding.default,
}


def operands_of(node: NodeProto) -> tuple[Operand, ...]:
    """The operands of a node that are there; none of an operator that is not quantized."""
    row = OPERANDS.get(node.op_type, ()) if node.domain == "" else ()
    operands = row(node) if callable(row) else row
    return tuple(o for o in operands if o.position < len(node.input) and node.input[o.position])
