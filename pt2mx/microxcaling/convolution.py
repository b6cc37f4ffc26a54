"""Convolutions. As in microxcaling their MX blocks are rounded "nearest", and have the formats of the forward pass in
the backward pass too, whatever the other keys say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional, grad
from torch.nn.modules.utils import _ntuple

from pt2mx.errors import MXError
from pt2mx.microxcaling.layers import MxLayer
from pt2mx.microxcaling.products import Product, Role
from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test

Size = int | tuple[int, ...] | str

_INPUT, _WEIGHT = partial(Role, "a_elem_format"), partial(Role, "w_elem_format")


def _product(dimensions: int) -> Product:
    input_gradient: Callable[..., Tensor] = getattr(grad, f"conv{dimensions}d_input")
    weight_gradient: Callable[..., Tensor] = getattr(grad, f"conv{dimensions}d_weight")
    return Product(
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


_PRODUCTS = {dimensions: _product(dimensions) for dimensions in (1, 2, 3)}


def _conv(
    dimensions: int,
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
    """The convolution of torch with input and weight in MX blocks along the input channels, and gradients whose
    operands are in blocks along the batch (the weight's) and the output channels (the input's).

    Args:
        input: (batch, channels in, ...).
        weight: (channels out, channels in / groups, ...).
        bias: (channels out,).
        mx_specs: None for torch's own.

    Raises:
        MXError: as `quantize_mx_op` and `quantize_elemwise_op`; for an input without a batch; for padding "same" that
            is not the same on both sides.
    """
    mx_assert_test(mx_specs)
    call = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if mx_specs is None:
        return getattr(functional, f"conv{dimensions}d")(input, weight, bias, **call)
    if input.dim() != dimensions + 2:
        raise MXError(f"input of shape {tuple(input.shape)} must have {dimensions + 2} dimensions, its batch the first")
    if isinstance(padding, str):
        call["padding"] = _padding_of(padding, weight.shape[2:], _ntuple(dimensions)(dilation))
    return _PRODUCTS[dimensions](input, weight, bias, apply_mx_specs(mx_specs), call)


def _padding_of(word: str, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    total = [d * (k - 1) if word == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    if word not in ("same", "valid") or any(n % 2 for n in total):
        raise MXError(f"padding={word!r} of a kernel of {tuple(kernel)} is not the same on both sides: pad the input")
    return tuple(n // 2 for n in total)


conv1d = partial(_conv, 1)
conv2d = partial(_conv, 2)
conv3d = partial(_conv, 3)


class _ConvLayer(MxLayer):
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
        how: tuple[Any, ...] = self.stride, self.padding, self.dilation, self.groups, self.mx_specs
        return _conv(len(self.kernel_size), inputs, self.weight, self.bias, *how)


class Conv1d(_ConvLayer, nn.Conv1d):
    """`torch.nn.Conv1d` that computes with `conv1d`."""


class Conv2d(_ConvLayer, nn.Conv2d):
    """`torch.nn.Conv2d` that computes with `conv2d`."""


class Conv3d(_ConvLayer, nn.Conv3d):
    """`torch.nn.Conv3d` that computes with `conv3d`."""
