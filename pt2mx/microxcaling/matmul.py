"""Multiply matrices and batches of matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.microxcaling.quantized_op import QuantizedOp, Role
from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test


def _quantized_matmul(first: str, second: str) -> QuantizedOp:
    """Return the matmul of operands that are activations ("a") or weights ("w")."""
    in_first, in_second = (
        [f"{operand}_elem_format", "round_mx_input_grad_input", f"{operand}_elem_format_bp"]
        for operand in (first, second)
    )
    of_grad = "a_elem_format_bp_os", "round_mx_grad_output_grad_input"
    return QuantizedOp(
        forward=lambda a, b, bias: torch.matmul(a, b),
        first=Role(in_first[0], -1, "round_mx_output"),
        second=Role(in_second[0], -2, "round_mx_output"),
        first_gradient=lambda grad, b, shape: (grad @ b.transpose(-1, -2)).sum_to_size(shape),
        first_gradient_roles=(Role(of_grad[0], -1, of_grad[1]), Role(in_second[2], -1, in_second[1])),
        second_gradient=lambda grad, a, shape: (a.transpose(-1, -2) @ grad).sum_to_size(shape),
        second_gradient_roles=(Role(of_grad[0], -2, of_grad[1]), Role(in_first[2], -2, in_first[1])),
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
    """Multiply matrices, as `mx.matmul` of microxcaling does: `torch.matmul(in1, in2) + bias` with operands in MX
    blocks along the dimensions that it and its gradients reduce.

    Args:
        in1: (..., rows, features).
        in2: (..., features, columns); leading dimensions are broadcast.
        bias: (columns,).
        mx_specs: as `finalize_mx_specs` returns them; None for torch's own.
        name: a label that changes nothing.
        mode_config: the formats of the two operands, of activations ("a") or weights ("w"): "aa", "aw" or "wa".

    Returns:
        (..., rows, columns) in the dtype of the operands.

    Raises:
        MXError: as `quantize_mx_op` and `quantize_elemwise_op`; for an operand of one dimension, or another mode.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({"a_elem_format": "fp4_e2m1", "block_size": 4})
        >>> mx.matmul(torch.tensor([[1.0, 2.9, -5.9, 0.3]]), torch.eye(4), mx_specs=specs)
        tensor([[ 1.0000,  3.0000, -6.0000,  0.5000]])
    """
    mx_assert_test(mx_specs)
    if mx_specs is None:
        return torch.matmul(in1, in2) if bias is None else torch.addmm(bias, in1, in2)
    for argument, x in (("in1", in1), ("in2", in2)):
        if x.dim() < 2:
            raise MXError(f"{argument} of shape {tuple(x.shape)} must have two dimensions or more: use unsqueeze")
    if mode_config not in _MODES:
        raise MXError(f"unknown mode_config {mode_config!r}: {nearest(mode_config, _MODES)}")
    return _MODES[mode_config](in1, in2, bias, apply_mx_specs(mx_specs))


_BMM: QuantizedOp = dataclasses.replace(_quantized_matmul("a", "a"), forward=lambda a, b, bias: torch.bmm(a, b))


def bmm(in1: Tensor, in2: Tensor, mx_specs: Mapping[str, object] | None = None, name: str | None = None) -> Tensor:
    """Multiply batches of matrices, as `mx.bmm` of microxcaling does: `torch.bmm` with operands in MX blocks along the
    dimensions that it and its gradients reduce.

    Args:
        in1: (batch, rows, features).
        in2: (batch, features, columns).
        mx_specs: as `finalize_mx_specs` returns them; None for torch's own.
        name: a label that changes nothing.

    Returns:
        (batch, rows, columns) in the dtype of the operands.

    Raises:
        MXError: as `quantize_mx_op` and `quantize_elemwise_op`.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({"a_elem_format": "fp4_e2m1", "block_size": 4})
        >>> x = torch.tensor([[[1.0, 2.9, -5.9, 0.3]]])
        >>> mx.bmm(x, torch.eye(4).unsqueeze(0), specs)
        tensor([[[ 1.0000,  3.0000, -6.0000,  0.5000]]])
    """
    mx_assert_test(mx_specs)
    return torch.bmm(in1, in2) if mx_specs is None else _BMM(in1, in2, None, apply_mx_specs(mx_specs))
