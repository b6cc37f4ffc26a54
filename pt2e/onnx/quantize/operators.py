"""The operators of a float ONNX file that are quantized: their operands, and the block axis of each.

A new operator is a new row. The block axis is the dimension that the operator reduces, as in
`pt2mx.pt2e.quantizer.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import NodeProto

from pt2mx.pt2e.onnx.nodes import node_attributes
from pt2mx.pt2e.quantizer.operators import ROWS, Operand, reduced_axis

#: the operands of a node, or a function of the node that returns them
Row = tuple[Operand, ...] | Callable[[NodeProto], tuple[Operand, ...]]


def _gemm(node: NodeProto) -> tuple[Operand, ...]:
    """Return the operands A (M, K) and B (K, N), each possibly transposed, and the bias."""
    attributes = node_attributes(node)
    return (
        Operand("input", 0, "operand", -2 if attributes.get("transA") else -1),
        Operand("other", 1, "operand", -1 if attributes.get("transB") else -2),
        Operand("bias", 2, "bias", -1),
    )


def _conv(weight_axis: int) -> tuple[Operand, ...]:
    # X (batch, channels, ...), W (out, in / groups, ...), transposed (in, out / groups, ...)
    return Operand("input", 0, "activation", 1), Operand("weight", 1, "weight", weight_axis), _BIAS


def block_axis(node: NodeProto, operand: Operand, shape: Sequence[object]) -> int:
    """Return the block axis of an operand of that shape."""
    if node.op_type != "Conv" or operand.name != "weight":
        return operand.axis
    return reduced_axis(shape, is_grouped=node_attributes(node).get("group", 1) > 1)


def _gather(node: NodeProto) -> tuple[Operand, ...]:
    return ROWS if node_attributes(node).get("axis", 0) == 0 else ()


_BIAS = Operand("bias", 2, "bias", -1)
# X (sequence, batch, in), W (directions, gates, in), R (directions, gates, hidden); hidden states are not quantized
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

#: matmuls and convolutions that stay in high precision, for the report
OTHER_MATMULS = ("Attention", "Einsum", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DeformConv")

#: the operator that `set_operator_type` means, if a file does not record the source of its node
ATEN = {
    "MatMul": "aten.matmul",
    "Gemm": "aten.linear",
    "Conv": "aten.convolution",
    "ConvTranspose": "aten.convolution",
    "LSTM": "aten.lstm.input",
    "GRU": "aten.gru.input",
    "RNN": "aten.rnn_tanh.input",
    "Gather": "aten.embedding",
}


def operands_of(node: NodeProto) -> tuple[Operand, ...]:
    """Return the operands that a node has; none for an operator that is not quantized."""
    row = OPERANDS.get(node.op_type, ()) if node.domain == "" else ()
    operands = row(node) if callable(row) else row
    return tuple(o for o in operands if o.position < len(node.input) and node.input[o.position])
