"""The definitions of `normed_linear_mx` and `residual_linear_mx`, the linear layers of a decoder's step.

A step has a few rows of x, so its small kernels between two matmuls take a large part of the time. The matmuls do their
work instead: RMSNorm, the gate of an MLP, the residual sum.

RMSNorm divides a row by its root mean square, one number, and multiplies it by a weight. The matmul before the norm
computes the residual sum. It also stores the sum times that weight, and the sum of squares of each 16 values. The
matmul after the norm multiplies the weighted row, and divides the result by the root mean square.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.mma_layout import ROWS, from_mma_layout

__all__ = ["GATES", "GATE_ROWS", "interleave", "normed_linear", "parts", "residual_linear"]

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


def normed_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    element: ElementFormat,
    n: int,
    squares: Tensor | None,
    eps: float,
    gate: str | None,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """x: (..., K) bfloat16, codes, scale: as of `to_mma_layout`, bias: (n,) bfloat16 or None, squares: (..., ceil(K /
    16)) fp32 as of `residual_linear`, or None -> (..., n) bfloat16, with a gate (..., n / 2)."""
    y = _matmul(x, codes, scale, element, n, tensor_scale)
    if squares is not None:
        y = y * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)
    y = (y if bias is None else y + bias).to(x.dtype)
    if gate is None:
        return y
    of_gate, values = parts(y.float())
    return (GATES[gate](of_gate) * values).to(x.dtype)


def residual_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    element: ElementFormat,
    n: int,
    residual: Tensor,
    norm_weight: Tensor,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, codes, scale, bias: as of `normed_linear`, residual: (..., n) bfloat16, norm_weight: (n,) bfloat16 -> the sum
    and the weighted sum, (..., n) bfloat16, and the squares of each 16 values of the sum, (..., ceil(n / 16)) fp32."""
    y = _matmul(x, codes, scale, element, n, tensor_scale)
    total = residual + (y if bias is None else y + bias).to(x.dtype)
    squares = F.pad(total.float().square(), (0, -n % ROWS)).unflatten(-1, (-1, ROWS)).sum(-1)
    return total, total * norm_weight, squares


def _matmul(
    x: Tensor, codes: Tensor, scale: Tensor, element: ElementFormat, n: int, tensor_scale: Tensor | None
) -> Tensor:
    """-> (..., n) fp32"""
    return F.linear(x.float(), from_mma_layout(codes, scale, element, n, x.shape[-1], tensor_scale).float())
