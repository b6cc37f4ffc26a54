"""Linear layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from pt2mx.microxcaling.quantized_op import MxLayer, QuantizedOp, Role
from pt2mx.microxcaling.specs import apply_mx_specs
from pt2mx.products import LINEAR

_LINEAR = QuantizedOp(
    forward=functional.linear,
    roles=(Role("a_elem_format", "round_mx_output"), Role("w_elem_format", "round_mx_output")),
    axes=(-1, -1),
    products=LINEAR,
    product_roles=(
        (
            Role("a_elem_format_bp_os", "round_mx_grad_output_grad_input"),
            Role("w_elem_format_bp", "round_mx_weight_grad_input"),
        ),
        (
            Role("a_elem_format_bp_ex", "round_mx_grad_output_grad_weight"),
            Role("a_elem_format_bp", "round_mx_input_grad_weight"),
        ),
    ),
    is_weight=True,
)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mx_specs: Mapping[str, object] | None = None,
    *,
    name: str | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.linear` with operands in MX blocks along the reduced dimension, forward and in the
    gradients, as `mx.linear` of microxcaling does. The weight's gradient reduces the input's rows.

    `name` is a label that changes nothing.
    """
    if mx_specs is None:
        return functional.linear(input, weight, bias)
    rows = input.unsqueeze(0) if input.dim() == 1 else input
    y = _LINEAR(rows, weight, bias, apply_mx_specs(mx_specs))
    return y.squeeze(0) if input.dim() == 1 else y


class Linear(MxLayer, nn.Linear):
    """microxcaling's `Linear`: `torch.nn.Linear` that computes with `linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mx_specs: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, mx_specs=mx_specs, name=name)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: (..., in) -> (..., out)."""
        return super().forward(inputs) if self.mx_none else linear(inputs, self.weight, self.bias, self.mx_specs)
