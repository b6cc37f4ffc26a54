"""The gates and the rows of `normed_linear_mx` and `residual_linear_mx`, the linear layers of a decoder's step.

A step has a few rows of x, so its small kernels between two matmuls take a large part of the time. The matmuls do their
work instead: RMSNorm, the gate of an MLP, the residual sum.

RMSNorm divides a row by its root mean square, one number, and multiplies it by a weight. The matmul before the norm
computes the residual sum. It also stores the sum times that weight, and the sum of squares of each 16 values. The
matmul after the norm multiplies the weighted row, and divides the result by the root mean square.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from pt2mx.kernels.gpu.mma_layout import ROWS

#: activation of the gate, by its name
GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
#: rows of the gate, then as many of the values that it multiplies: a tile of the weight has both
GATE_ROWS = ROWS // 2


def interleave(rows: Tensor) -> Tensor:
    """(2 n, ...), all rows of a gate and then n rows of values -> the same rows, `GATE_ROWS` of each in turns."""
    return rows.unflatten(0, (2, -1, GATE_ROWS)).transpose(0, 1).flatten(0, 2)


def parts(y: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 2 n), columns in the order of `interleave` -> the n columns of the gate, and the n others."""
    gate, values = y.unflatten(-1, (-1, 2, GATE_ROWS)).unbind(-2)
    return gate.flatten(-2), values.flatten(-2)
