"""Convolve, and convolve transposed.

As in microxcaling, the rounding of MX blocks is "nearest", and the backward pass has the formats of the forward pass.
Other keys of the specs change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional, grad
from torch.nn.grad import conv2d_weight
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.utils import _ntuple

from pt2mx.errors import MXError
from pt2mx.microxcaling.quantized_op import MxLayer, QuantizedOp, Role
from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test

Size = int | tuple[int, ...] | str

_INPUT, _WEIGHT = partial(Role, "a_elem_format"), partial(Role, "w_elem_format")


def _quantized_convolution(dimensions: int) -> QuantizedOp:
    input_gradient: Callable[..., Tensor] = getattr(grad, f"conv{dimensions}d_input")
    weight_gradient: Callable[..., Tensor] = getattr(grad, f"conv{dimensions}d_weight")
    return QuantizedOp(
        forward=getattr(functional, f"conv{dimensions}d"),
        first=_INPUT(1),
        second=_WEIGHT(1),
        first_gradient=lambda grad, weight, shape, **call: input_gradient(shape, weight, grad, **call),
        first_gradient_roles=(_INPUT(1), _WEIGHT(0)),
        second_gradient=lambda grad, x, shape, **call: weight_gradient(x, shape, grad, **call),
        second_gradient_roles=(_INPUT(0), _INPUT(0)),
        is_weight=True,
        adds_bias=False,
    )


_CONVOLUTIONS = {dimensions: _quantized_convolution(dimensions) for dimensions in (1, 2, 3)}


class _Function(Protocol):
    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        mx_specs: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> Tensor: ...


_FUNCTION = """Convolve, as `mx.conv{n}d` of microxcaling does: `torch.nn.functional.conv{n}d` with input and weight in
    MX blocks along the input channels. Blocks of the operands run along the batch for the weight's gradient, and along
    the output channels for the input's gradient.

    Args:
        input: (batch, channels in, {sizes}).
        weight: (channels out, channels in / groups, {kernel}).
        bias: (channels out,).
        stride, padding, dilation, groups: as torch takes them.
        mx_specs: as `finalize_mx_specs` returns them; None for torch's own.
        name: a label that changes nothing.

    Returns:
        (batch, channels out, {sizes}), with torch's sizes.

    Raises:
        MXError: as `quantize_mx_op` and `quantize_elemwise_op`; for an input without a batch; for padding "same" that
            is not the same on both sides.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({{"a_elem_format": "fp4_e2m1", "w_elem_format": "int8", "block_size": 4}})
        >>> x = torch.tensor([1.0, 2.9, -5.9, 0.3]).view(1, 4, {ones})
        >>> mx.conv{n}d(x, torch.ones(1, 4, {ones}), mx_specs=specs).item()
        -1.5
    """


def _function(dimensions: int) -> _Function:
    def conv(
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
        mx_assert_test(mx_specs)
        call = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if mx_specs is None:
            return getattr(functional, f"conv{dimensions}d")(input, weight, bias, **call)
        if input.dim() != dimensions + 2:
            shape = tuple(input.shape)
            raise MXError(f"input of shape {shape} must have {dimensions + 2} dimensions, its batch the first")
        if isinstance(padding, str):
            call["padding"] = _padding_of(padding, weight.shape[2:], _ntuple(dimensions)(dilation))
        return _CONVOLUTIONS[dimensions](input, weight, bias, apply_mx_specs(mx_specs), call)

    conv.__name__ = conv.__qualname__ = f"conv{dimensions}d"
    conv.__doc__ = _FUNCTION.format(**_words(dimensions))
    return conv


def _words(dimensions: int) -> dict[str, object]:
    """Return the words of a docstring that depend on the number of dimensions."""
    sizes = ("depth", "height", "width")[-dimensions:] if dimensions > 1 else ("length",)
    return {
        "n": dimensions,
        "sizes": ", ".join(sizes),
        "kernel": ", ".join(f"kernel {size}" for size in sizes),
        "ones": ", ".join("1" * dimensions),
    }


def _padding_of(word: str, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    total = [d * (k - 1) if word == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    if word not in ("same", "valid") or any(n % 2 for n in total):
        raise MXError(f"padding={word!r} of a kernel of {tuple(kernel)} is not the same on both sides: pad the input")
    return tuple(n // 2 for n in total)


conv1d, conv2d, conv3d = _function(1), _function(2), _function(3)
_FUNCTIONS = {1: conv1d, 2: conv2d, 3: conv3d}

_LAYER = """The layer `mx.Conv{n}d` of microxcaling: `torch.nn.Conv{n}d` that computes with `conv{n}d`.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as `torch.nn.Conv{n}d` takes
            them; padding is of zeros.
        mx_specs: as `finalize_mx_specs` returns them; None for a layer that computes as torch's.
        name: a label that changes nothing.

    Raises:
        MXError: for an unknown key of the specs; at a call, as `conv{n}d`.

    Example:
        >>> import torch
        >>> from pt2mx import microxcaling as mx
        >>> specs = mx.finalize_mx_specs({{"a_elem_format": "fp4_e2m1", "w_elem_format": "int8", "block_size": 4}})
        >>> layer = mx.Conv{n}d(4, 1, 1, bias=False, mx_specs=specs)
        >>> layer.weight.data = torch.ones(1, 4, {ones})
        >>> layer(torch.tensor([1.0, 2.9, -5.9, 0.3]).view(1, 4, {ones})).item()
        -1.5
    """


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
        return _FUNCTIONS[len(self.kernel_size)](inputs, self.weight, self.bias, *how)


class Conv1d(_ConvLayer, nn.Conv1d):
    __doc__ = _LAYER.format(**_words(1))


class Conv2d(_ConvLayer, nn.Conv2d):
    __doc__ = _LAYER.format(**_words(2))


class Conv3d(_ConvLayer, nn.Conv3d):
    __doc__ = _LAYER.format(**_words(3))


_CONV_TRANSPOSE = QuantizedOp(
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
    along the input channels. Blocks of the operands run along the batch for the weight's gradient, and along the output
    channels for the input's gradient.

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
