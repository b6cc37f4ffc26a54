"""Linear layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.microxcaling.elemwise_ops import quantize_elemwise_op
from pt2mx.microxcaling.quantized_op import MxLayer, QuantizedOp, Role
from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test

_LINEAR = QuantizedOp(
    forward=functional.linear,
    first=Role("a_elem_format", -1, "round_mx_output"),
    second=Role("w_elem_format", -1, "round_mx_output"),
    first_gradient=lambda grad, weight, shape: grad @ weight,
    first_gradient_roles=(
        Role("a_elem_format_bp_os", -1, "round_mx_grad_output_grad_input"),
        Role("w_elem_format_bp", 0, "round_mx_weight_grad_input"),
    ),
    second_gradient=lambda grad, x, shape: grad.flatten(0, -2).t() @ x.flatten(0, -2),
    second_gradient_roles=(
        Role("a_elem_format_bp_ex", -2, "round_mx_grad_output_grad_weight"),
        Role("a_elem_format_bp", -2, "round_mx_input_grad_weight"),
    ),
    is_weight=True,
)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mx_specs: Mapping[str, object] | None = None,
    prequantized_weights: bool = False,
    name: str | None = None,
) -> Tensor:
    """Compute a linear layer, as `mx.linear` of microxcaling does: `torch.nn.functional.linear` with operands in MX
    blocks along the reduced dimension, forward and in the gradients. The weight's gradient reduces the input's last but
    one dimension, its rows.

    Args:
        input: (..., in).
        weight: (out, in).
        bias: (out,).
        mx_specs: as `finalize_mx_specs` returns them; None for torch's own.
        prequantized_weights: true if weight and bias are bfloat16, as `Linear.prequantize_weights` makes them; they get
            no gradient.
        name: a label that changes nothing.

    Returns:
        (..., out) in the dtype of the input.

    Raises:
        MXError: as `quantize_mx_op` and `quantize_elemwise_op`; for prequantized weights of another dtype.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({"a_elem_format": "fp4_e2m1", "w_elem_format": "int8", "block_size": 4})
        >>> mx.linear(torch.tensor([1.0, 2.9, -5.9, 0.3]), torch.eye(4), mx_specs=specs)
        tensor([ 1.0000,  3.0000, -6.0000,  0.5000])
    """
    mx_assert_test(mx_specs)
    if mx_specs is None:
        return functional.linear(input, weight, bias)
    if prequantized_weights:
        weight = _prequantized(weight, input.dtype)
        bias = None if bias is None else _prequantized(bias, input.dtype)
    rows = input.unsqueeze(0) if input.dim() == 1 else input
    y = _LINEAR(rows, weight, bias, apply_mx_specs(mx_specs))
    return y.squeeze(0) if input.dim() == 1 else y


def _prequantized(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    if parameter.dtype != torch.bfloat16:
        raise MXError(f"prequantized weights are bfloat16, not {parameter.dtype}")
    return parameter.detach().to(dtype)


class Linear(MxLayer, nn.Linear):
    """The layer `mx.Linear` of microxcaling: `torch.nn.Linear` that computes with `linear`.

    Args:
        in_features, out_features, bias: as `torch.nn.Linear` takes them.
        mx_specs: as `finalize_mx_specs` returns them; None for a layer that computes as torch's.
        name: a label that changes nothing.

    Raises:
        MXError: for an unknown key of the specs; at a call, as `linear`.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({"a_elem_format": "fp4_e2m1", "w_elem_format": "int8", "block_size": 4})
        >>> layer = mx.Linear(4, 4, bias=False, mx_specs=specs)
        >>> layer.weight.data = torch.eye(4)
        >>> layer(torch.tensor([1.0, 2.9, -5.9, 0.3])).detach()
        tensor([ 1.0000,  3.0000, -6.0000,  0.5000])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mx_specs: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, mx_specs=mx_specs, name=name)
        self.prequantized_weights = False

    def prequantize_weights(self) -> None:
        """Round weight and bias to bfloat16, as the specs do, and keep them so for inference. Do nothing without specs.

        Raises:
            MXError: if the specs do not round to bfloat16 with subnormals, ties to even.
        """
        if self.mx_none:
            return
        needed = {"bfloat": 16, "round": "even", "round_weight": "even", "bfloat_subnorms": True}
        if wrong := {key: self.mx_specs[key] for key, value in needed.items() if self.mx_specs[key] != value}:
            raise MXError(f"prequantize_weights needs mx_specs with {needed}, and finds {wrong}")
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.data = quantize_elemwise_op(parameter.data, self.mx_specs, "even").to(torch.bfloat16)
        self.prequantized_weights = True

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: (..., in) -> (..., out)."""
        if self.mx_none:
            return super().forward(inputs)
        if self.prequantized_weights and self.training:
            raise MXError("prequantized weights cannot be trained: call eval() on the layer first")
        return linear(inputs, self.weight, self.bias, self.mx_specs, self.prequantized_weights)
