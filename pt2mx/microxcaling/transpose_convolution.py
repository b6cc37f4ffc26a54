"""Transposed convolutions, with the roundings and formats of `pt2mx.microxcaling.convolution`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from pt2mx.errors import MXError
from pt2mx.microxcaling.layers import MxLayer
from pt2mx.microxcaling.products import Product, Role

_INPUT, _WEIGHT = partial(Role, "a_elem_format"), partial(Role, "w_elem_format")

_CONV_TRANSPOSE = Product(
    forward=functional.conv_transpose2d,
    first=_INPUT(1),
    second=_WEIGHT(0),
    first_gradient=lambda grad, weight, shape, output_padding, **call: functional.conv2d(grad, weight, **call),
    first_gradient_roles=(_INPUT(1), _WEIGHT(1)),
    second_gradient=lambda grad, x, shape, output_padding, **call: conv2d_weight(grad, shape, x, **call),
    second_gradient_roles=(_INPUT(0), _INPUT(0)),
    is_weight=True,
    adds_bias=False,
)


class ConvTranspose2d(MxLayer, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` with input and weight in MX blocks along the input channels, and gradients whose
    operands are in blocks along the batch (the weight's) and the output channels (the input's)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        mx_specs: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> None:
        how = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        super().__init__(
            in_channels, out_channels, kernel_size, **how, groups=groups, bias=bias, mx_specs=mx_specs, name=name
        )

    def forward(self, inputs: Tensor, output_size: list[int] | None = None) -> Tensor:
        """inputs: (batch, channels in, height, width) -> (batch, channels out, ...).

        Raises:
            MXError: as `quantize_mx_op` and `quantize_elemwise_op`; for an input without a batch.
        """
        if self.mx_none:
            return super().forward(inputs, output_size)
        if inputs.dim() != 4:
            raise MXError(f"input of shape {tuple(inputs.shape)} must have 4 dimensions, its batch the first")
        sizes = self.stride, self.padding, self.kernel_size, 2, self.dilation
        call = {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": tuple(self._output_padding(inputs, output_size, *sizes)),
            "groups": self.groups,
            "dilation": self.dilation,
        }
        return _CONV_TRANSPOSE(inputs, self.weight, self.bias, self.mx_specs, call)
