"""Matmuls whose products are added in a register of limited precision, in C++ (`src/accumulated_matmul.cpp`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.accumulator import KINDS, Accumulator
from pt2mx.kernels.cpu.build import run
from pt2mx.kernels.cpu.calls import AccumulatedCall

if TYPE_CHECKING:
    from pt2mx.ops.accumulated import MatmulAccumulated


#: kind -> its number in C++
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def matmul(call: MatmulAccumulated[Tensor], accumulator: Accumulator) -> Tensor:
    """x: (*batch, M, K), other: (*batch, K, N) -> (*batch, M, N) float32."""
    x, other = call.x, call.other
    out = x.new_zeros(call.result_shape, dtype=torch.float32)
    if not out.numel() or not x.shape[-1]:
        return out
    one_matrix = other.dim() == 2  # all rows are those of one batch
    if not one_matrix:
        x, other = (tensor.expand(*out.shape[:-2], *tensor.shape[-2:]) for tensor in (x, other))
    x, other = (tensor.to(torch.float32).contiguous() for tensor in (x, other))
    integer, fraction = ((0, 0) + accumulator.numbers)[-2:]
    structure = AccumulatedCall(
        kind=_NUMBERS[accumulator.kind],
        integer_bits=integer,
        fraction_bits=fraction,
        batch=1 if one_matrix else math.prod(out.shape[:-2]),
        m=math.prod(out.shape[:-1]) if one_matrix else out.shape[-2],
        n=out.shape[-1],
        k=x.shape[-1],
        group=accumulator.group,
        promotion=accumulator.promotion,
        x=x.data_ptr(),
        other=other.data_ptr(),
        out=out.data_ptr(),
    )
    run("pt2mx_accumulated_matmul", structure)
    return out
