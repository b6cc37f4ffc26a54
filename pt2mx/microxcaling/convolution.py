"""Convolve, and convolve transposed.

As in microxcaling, the rounding of MX blocks is "nearest", and the backward pass has the formats of the forward pass.
Other keys of the specs change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.utils import _ntuple

from pt2mx.errors import MXError
from pt2mx.microxcaling.quantized_op import MxLayer, QuantizedOp, Role
from pt2mx.microxcaling.specs import apply_mx_specs
from pt2mx.products import CONVOLUTION, TRANSPOSED_CONVOLUTION, Products

Size = int | tuple[int, ...] | str

_INPUT, _WEIGHT = Role("a_elem_format"), Role("w_elem_format")


def _quantized_convolution(forward: Callable[..., Tensor], weight_axis: int, products: Products) -> QuantizedOp:
    return QuantizedOp(
        forward=forward,
        roles=(_INPUT, _WEIGHT),
        axes=(1, weight_axis),
        products=products,
        product_roles=((_INPUT, _WEIGHT), (_INPUT, _INPUT)),
        is_weight=True,
        adds_bias=False,
    )


_CONVOLUTIONS = {
    dimensions: _quantized_convolution(getattr(functional, f"conv{dimensions}d"), 1, CONVOLUTION)
    for dimensions in (1, 2, 3)
}


def _convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    mx_specs: Mapping[str, object] | None = None,
    name: str | None = None,
) -> Tensor:
    """Convolve with input and weight in MX blocks along the input channels, as `mx.conv1d`, `mx.conv2d` and `mx.conv3d`
    of microxcaling do. Blocks of the operands run along the batch for the weight's gradient, and along the output
    channels for the input's gradient.

    The weight, (channels out, channels in / groups, ...), has 1, 2 or 3 more dimensions.

    Raises:
        MXError: for other numbers of dimensions, an input without a batch, and padding "same" that is not the same on
            both sides.
    """
    dimensions = weight.dim() - 2
    if dimensions not in _CONVOLUTIONS:
        raise MXError(f"weight of shape {tuple(weight.shape)} must have 3, 4 or 5 dimensions")
    call = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if mx_specs is None:
        return _CONVOLUTIONS[dimensions].forward(input, weight, bias, **call)
    if input.dim() != weight.dim():
        raise MXError(f"input of shape {tuple(input.shape)} must have {weight.dim()} dimensions, its batch the first")
    each = _ntuple(dimensions)
    if isinstance(padding, str):
        padding = _padding_of(padding, weight.shape[2:], each(dilation))
    call |= {"stride": each(stride), "padding": each(padding), "dilation": each(dilation)}
    return _CONVOLUTIONS[dimensions](input, weight, bias, apply_mx_specs(mx_specs), call)


conv1d = conv2d = conv3d = _convolve


def _padding_of(word: str, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    total = [d * (k - 1) if word == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    if word not in ("same", "valid") or any(n % 2 for n in total):
        raise MXError(f"padding={word!r} of a kernel of {tuple(kernel)} is not the same on both sides: pad the input")
    return tuple(n // 2 for n in total)


class _ConvLayer(MxLayer, _ConvNd):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        mx_specs: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> None:
        channels = in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias
        super().__init__(*channels, mx_specs=mx_specs, name=name)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: (batch, channels in, ...) -> (batch, channels out, ...)."""
        if self.mx_none:
            return super().forward(inputs)
        how = self.stride, self.padding, self.dilation, self.groups, self.mx_specs
        return _convolve(inputs, self.weight, self.bias, *how)


class Conv1d(_ConvLayer, nn.Conv1d):
    """microxcaling's `Conv1d`: `torch.nn.Conv1d` that computes with `conv1d`; padding is of zeros."""


class Conv2d(_ConvLayer, nn.Conv2d):
    """microxcaling's `Conv2d`: `torch.nn.Conv2d` that computes with `conv2d`; padding is of zeros."""


class Conv3d(_ConvLayer, nn.Conv3d):
    """microxcaling's `Conv3d`: `torch.nn.Conv3d` that computes with `conv3d`; padding is of zeros."""


_CONV_TRANSPOSE = _quantized_convolution(functional.conv_transpose2d, 0, TRANSPOSED_CONVOLUTION)


class ConvTranspose2d(MxLayer, nn.ConvTranspose2d):
    """microxcaling's `ConvTranspose2d`: `torch.nn.ConvTranspose2d` with input and weight in MX blocks along the input
    channels. Blocks run along the batch for the weight's gradient, and along the output channels for the input's."""

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
        """inputs: (batch, channels in, height, width) -> (batch, channels out, ...)."""
        if self.mx_none:
            return super().forward(inputs, output_size)
        if inputs.dim() != 4:
            raise MXError(f"input of shape {tuple(inputs.shape)} must have 4 dimensions, its batch the first")
        output_padding = self._output_padding(
            inputs,
            output_size,
            list(self.stride),
            list(self.padding),  # type: ignore[arg-type]  # the other convolutions alone use it
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
