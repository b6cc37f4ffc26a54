"""Multiply matrices and batches of matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.microxcaling.quantized_op import QuantizedOp, Role
from pt2mx.microxcaling.specs import apply_mx_specs
from pt2mx.products import MATMUL


def _quantized_matmul(first: str, second: str) -> QuantizedOp:
    """Return the matmul of operands that are activations ("a") or weights ("w")."""
    gradient = Role("a_elem_format_bp_os", "round_mx_grad_output_grad_input")
    of_operand = "round_mx_input_grad_input"
    return QuantizedOp(
        forward=lambda a, b, bias: torch.matmul(a, b),
        roles=(Role(f"{first}_elem_format", "round_mx_output"), Role(f"{second}_elem_format", "round_mx_output")),
        axes=(-1, -2),
        products=MATMUL,
        product_roles=(
            (gradient, Role(f"{second}_elem_format_bp", of_operand)),
            (gradient, Role(f"{first}_elem_format_bp", of_operand)),
        ),
        is_weight=False,
    )


_MODES = {mode: _quantized_matmul(*mode) for mode in ("aa", "aw", "wa")}


def matmul(
    in1: Tensor,
    in2: Tensor,
    bias: Tensor | None = None,
    mx_specs: Mapping[str, object] | None = None,
    name: str | None = None,
    mode_config: str = "aa",
) -> Tensor:
    """Compute `torch.matmul(in1, in2) + bias` with operands in MX blocks along the dimensions that it and its gradients
    reduce, as `mx.matmul` of microxcaling does.

    `mode_config` says whether each operand has the formats of activations ("a") or weights ("w").

    Raises:
        MXError: for an operand of one dimension, and another mode.
    """
    if mx_specs is None:
        return torch.matmul(in1, in2) if bias is None else torch.addmm(bias, in1, in2)
    for argument, x in (("in1", in1), ("in2", in2)):
        if x.dim() < 2:
            raise MXError(f"{argument} of shape {tuple(x.shape)} must have two dimensions or more: use unsqueeze")
    if mode_config not in _MODES:
        raise MXError(f"unknown mode_config {mode_config!r}: {nearest(mode_config, _MODES)}")
    return _MODES[mode_config](in1, in2, bias, apply_mx_specs(mx_specs))


_BMM: QuantizedOp = dataclasses.replace(_MODES["aa"], forward=lambda a, b, bias: torch.bmm(a, b))


def bmm(in1: Tensor, in2: Tensor, mx_specs: Mapping[str, object] | None = None, name: str | None = None) -> Tensor:
    """Compute `torch.bmm` as `matmul` computes `torch.matmul`, as `mx.bmm` of microxcaling does."""
    return torch.bmm(in1, in2) if mx_specs is None else _BMM(in1, in2, None, apply_mx_specs(mx_specs))
