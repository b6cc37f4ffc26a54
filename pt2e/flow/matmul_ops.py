"""Operators that a report must know by name: matmul-like operators, and the operators of lowered models.

Words in its name mark a matmul-like operator. They also match custom operators (`mylib::grouped_mm`) and operators of
later versions of torch.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import node_arg
from pt2mx.ops import linear, scaled_mm
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.fp8_rowwise import mm_fp8_rows
from pt2mx.ops.quantize_epilogue import conv2d_fake_quantize_mx, linear_fake_quantize_mx

#: an operator with one of these words in its name is matmul-like ...
_WORDS = frozenset({
    "mm", "addmm", "bmm", "addbmm", "baddbmm", "mv", "addmv", "smm", "hspmm", "sspaddmm", "matmul", "gemm", "gemv",
    "dot", "vdot", "vecdot", "inner", "tensordot", "einsum", "linear", "bilinear", "trilinear", "cdist", "euclidean",
    "conv", "conv1d", "conv2d", "conv3d", "convolution", "lstm", "gru", "rnn", "attention", "transformer",
})  # fmt: skip
#: ... unless its name also has one of these: it prepares a matmul, or belongs to the derivative of one
_HELPERS = frozenset({"backward", "flatten", "reorder", "prepack", "pack", "quantize", "search"})


def operator_path(target: object) -> str:
    """Return `aten.conv2d` for every overload of it, `higher_order.flex_attention`; "" for no operator of torch."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    return ""


def is_matmul_like(target: object) -> bool:
    """Return True if a call's target is a matmul, convolution, recurrent layer, attention, or vector distance."""
    namespace, _, name = operator_path(target).partition(".")
    words = frozenset(name.split("_"))
    return namespace != "pt2mx" and bool(words & _WORDS) and not words & _HELPERS


aten = torch.ops.aten

#: operators that read codes and scales directly
_PACKED = (
    linear.linear_mx,
    linear.grouped_linear_mx,
    linear.linear_mx_mma_layout,
    linear_fake_quantize_mx,
    conv2d_mx,
    conv2d_fake_quantize_mx,
    scaled_mm.scaled_mm_mx,
    mm_fp8_rows,
    attention_mx,
)
_GATHERS = (aten.embedding.default, aten.index_select.default, aten.index.Tensor)


def refuse_lowered(model: GraphModule) -> None:
    """Raise an `MXError` for a lowered model, in which an operator reads a packed weight."""
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            if node.target in _PACKED or _gathers_codes(node):
                raise MXError(
                    f"{node} reads a packed weight, as lower_to_inductor leaves it: report the converted model, before "
                    "it is lowered; pt2mx.packed_weights lists its packed weights"
                )


def _gathers_codes(node: Node) -> bool:
    """Return True for a dequantization of gathered rows of a packed weight."""
    codes = node_arg(node) if node.target is ops.dequantize_mx else node
    return codes is not node and codes.target in _GATHERS and node_arg(codes).op == "get_attr"
