"""The operators that sum products of their arguments: those that a report must name, quantized or not.

An operator is known by the words of its name, so that custom ones (`mylib::grouped_mm`) and those of later versions of
torch are found too.
"""

from __future__ import annotations

import torch

#: an operator whose name has one of these words is a contraction ...
_CONTRACTIONS = frozenset({
    "mm", "addmm", "bmm", "addbmm", "baddbmm", "mv", "addmv", "smm", "hspmm", "sspaddmm", "matmul", "gemm", "gemv",
    "dot", "vdot", "vecdot", "inner", "tensordot", "einsum", "linear", "bilinear", "trilinear", "cdist", "euclidean",
    "conv", "conv1d", "conv2d", "conv3d", "convolution", "lstm", "gru", "rnn", "attention", "transformer",
})  # fmt: skip
#: ... but with one of these it prepares one, or belongs to its derivative
_HELPERS = frozenset({"backward", "flatten", "reorder", "prepack", "pack", "quantize", "search"})


def operator_path(target: object) -> str:
    """`aten.conv2d` for every overload of it, `higher_order.flex_attention`; "" for what is no operator of torch."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    return ""


def is_contraction(target: object) -> bool:
    """True if the target of a call sums products: a matrix product, a convolution, a recurrent layer, attention, a
    distance between vectors."""
    namespace, _, name = operator_path(target).partition(".")
    words = frozenset(name.split("_"))
    return namespace != "pt2mx" and bool(words & _CONTRACTIONS) and not words & _HELPERS
