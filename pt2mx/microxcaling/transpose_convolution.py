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
    """The layer `mx.ConvTranspose2d` of microxcaling: `torch.nn.ConvTranspose2d` with input and weight in MX blocks
    along the input channels, and gradients whose operands are in blocks along the batch (the weight's) and the output
    channels (the input's).

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups, bias: as
            `torch.nn.ConvTranspose2d` takes them.
        mx_specs: as `finalize_mx_specs` returns them; None for a layer that computes as torch's.
        name: a label that changes nothing.

    Raises:
        MXError: for an unknown key of the specs.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({"a_elem_format": "fp4_e2m1", "w_elem_format": "int8", "block_size": 4})
        >>> layer = mx.ConvTranspose2d(4, 1, 1, bias=False, mx_specs=specs)
        >>> layer.weight.data = torch.ones(4, 1, 1, 1)
        >>> layer(torch.tensor([1.0, 2.9, -5.9, 0.3]).view(1, 4, 1, 1)).item()
        -1.5
    """

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
        how = kernel_size, stride, padding, output_padding, groups, bias, dilation
        super().__init__(in_channels, out_channels, *how, mx_specs=mx_specs, name=name)

    def forward(self, inputs: Tensor, output_size: list[int] | None = None) -> Tensor:
        """inputs: (batch, channels in, height, width) -> (batch, channels out, ...).

        Raises:
            MXError: as `quantize_mx_op` and `quantize_elemwise_op`; for an input without a batch.
        """
        if self.mx_none:
            return super().forward(inputs, output_size)
        if inputs.dim() != 4:
            raise MXError(f"input of shape {tuple(inputs.shape)} must have 4 dimensions, its batch the first")
        output_padding = self._output_padding(
            inputs,
            output_size,
            list(self.stride),
            list(self.padding),  # type: ignore[arg-type]  # a word is for the other convolutions only
            list(self.kernel_size),
            2,
            list(self.dilation),
        )
        call = {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": tuple(output_padding),
            "groups": self.groups,
            "dilation": self.dilation,
        }
        return _CONV_TRANSPOSE(inputs, self.weight, self.bias, self.mx_specs, call)
