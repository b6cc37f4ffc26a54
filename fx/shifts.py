"""Shifts of bits as arithmetic: compilers of core aten operators have no shifts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

aten = torch.ops.aten


def without_shifts(program: ExportedProgram) -> ExportedProgram:
    """Decompose the shifts of a program into products and rounded quotients, which are equal for integers."""
    with torch.no_grad():
        return program.run_decompositions(SHIFTS)


def _left(x: Tensor, bits: int) -> Tensor:
    return x * (1 << bits)


def _left_each(x: Tensor, bits: Tensor) -> Tensor:
    return x * _power(bits)


def _right(x: Tensor, bits: int) -> Tensor:
    return torch.div(x, 1 << bits, rounding_mode="floor")


def _right_each(x: Tensor, bits: Tensor) -> Tensor:
    return torch.div(x, _power(bits), rounding_mode="floor")


def _power(bits: Tensor) -> Tensor:
    """2**bits by a power of floats, which is all that IREE (3.13) has; rounded, its accuracy does not matter."""
    return torch.pow(2.0, bits.to(torch.float32)).round().to(bits.dtype)


SHIFTS: dict[Any, Callable[..., Tensor]] = {
    aten.bitwise_left_shift.Tensor_Scalar: _left,
    aten.bitwise_left_shift.Tensor: _left_each,
    aten.bitwise_right_shift.Tensor_Scalar: _right,
    aten.bitwise_right_shift.Tensor: _right_each,
}
