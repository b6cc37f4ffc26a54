"""Round to floats of fewer bits without blocks, by `mx_specs`: `bfloat` (8 exponent bits) and `fp` (5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.microxcaling.mx_ops import rounding_name
from pt2mx.microxcaling.specs import MxSpecs, apply_mx_specs, get_backwards_mx_specs
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.checks import check_tensors


@torch.no_grad()
def quantize_elemwise_op(A: Tensor, mx_specs: Mapping[str, object] | None, round: str | None = None) -> Tensor:
    """Round A, (...) floating-point, to floats of fewer bits, as `mx.quantize_elemwise_op` of microxcaling does.

    The specs' `bfloat` or `fp` is the width; A itself is returned without one. `round` replaces the specs' `round`. A
    value that rounds beyond the largest one becomes Inf; Inf and NaN stay. No gradient passes.

    Raises:
        MXError: for two widths, for a width that leaves no mantissa (`bfloat` up to 9, `fp` up to 6), for a tensor
            without floats, and for an unknown rounding.
    """
    if mx_specs is None:
        return A
    specs = apply_mx_specs(mx_specs)
    bfloat, fp = specs["bfloat"], specs["fp"]
    if not fp and (not bfloat or bfloat == 32):
        return A
    check_tensors(A=A)
    if bfloat and fp:
        raise MXError(f"mx_specs set both bfloat={bfloat} and fp={fp}: set one")
    key, bits, exponent_bits = ("bfloat", bfloat, 8) if bfloat else ("fp", fp, 5)
    if type(bits) is not int or bits <= exponent_bits + 1:
        raise MXError(f"{key}={bits!r} must be an integer above {exponent_bits + 1}, or 0 for none")
    if not A.is_floating_point():
        raise MXError(f"a tensor of dtype {A.dtype} has no floats to round: cast it first, for example with A.float()")
    rounding = rounding_name(specs["round"] if round is None else round)
    return _round_floats(A, exponent_bits, bits - 1 - exponent_bits, rounding, specs["bfloat_subnorms"])


def _round_floats(A: Tensor, exponent_bits: int, mantissa_bits: int, rounding: str, subnormals: bool) -> Tensor:
    """Round in float64, where every step is exact."""
    bias = 2 ** (exponent_bits - 1) - 1
    x = A.double()
    if not subnormals:
        x = torch.where(x.abs() < 2.0 ** (1 - bias), 0.0, x)
    binade = torch.frexp(x.masked_fill(~x.isfinite(), 0.0)).exponent - 1  # floor(log2 |x|)
    quantum = _pow2(binade.clamp(min=1 - bias) - mantissa_bits)
    random = torch.randint(1 << 31, x.shape, dtype=torch.int32, device=x.device) if rounding == "stochastic" else None
    y = ROUNDINGS[rounding].to_quanta(x / quantum, random) * quantum
    beyond = y.abs() > 2.0**bias * (2 - 2.0**-mantissa_bits)
    y = torch.where(beyond, torch.copysign(torch.full_like(y, torch.inf), y), y)
    return torch.where(x.isfinite(), y, x).to(A.dtype)


def _pow2(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float64, made from its bits."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def quantize_bfloat(x: Tensor, mx_specs: Mapping[str, object] | None, round: str | None = None) -> Tensor:
    """Round as `quantize_elemwise_op` does, with a gradient, as `mx.quantize_bfloat` of microxcaling does. The gradient
    is rounded too if the specs' `quantize_backprop` is true."""
    return x if mx_specs is None else _Rounded.apply(x, apply_mx_specs(mx_specs), round)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, specs: MxSpecs, round: str | None) -> Tensor:
        ctx.specs, ctx.round = specs, round
        return quantize_elemwise_op(x, specs, round)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return quantize_elemwise_op(grad, get_backwards_mx_specs(ctx.specs), ctx.round), None, None
