"""Convolutions whose results or inputs the graph writes."""

import pytest
import torch
from torch import nn

from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.kernels.cpu import uses
from pt2mx.kernels.cpu.linear import AVX512_BF16
from pt2mx.ops.convolution import conv2d_mx
from tests.flow import convert
from tests.graph import count

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def bfloat16_instructions(monkeypatch):
    """Run the pass on every machine: a dense matmul replaces the kernel without bfloat16 instructions."""
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: 0 if spec.block_size % 32 else AVX512_BF16)


def lowered(model, x, name="mxfp8"):
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(name, name))
    converted = convert(model, (x,), quantizer)
    return converted, lower_to_inductor(converted)


def first_channels(y):
    y[:, :2] = 5.0
    return y


def whole_view(y):
    y.view(-1).mul_(2)
    return y


def flat(y):
    y.flatten(1).mul_(2.0)
    return y.sum((2, 3))


def reshaped(y):
    y.reshape(len(y), -1)[:, 0] = 100.0
    return y.sum((2, 3))


def through_another(y):
    other = torch.zeros_like(y)
    other.copy_(y)
    other.view(-1)[3] = 2.0
    return other


def copied(y):
    """Write to a copy; with the channels last this would be a view."""
    rows = y.permute(0, 2, 3, 1).reshape(-1, y.shape[1])
    rows.mul_(2.0)
    return y.sum((2, 3))


def written_behind_a_copy(y):
    rows = y.permute(0, 2, 3, 1).reshape(-1, y.shape[1])
    y.mul_(2.0)
    return rows


@pytest.mark.parametrize(
    "write", [first_channels, whole_view, flat, reshaped, through_another, copied, written_behind_a_copy]
)
def test_results_that_are_written(write):
    """A view through which a graph writes stays a view, and an output has its last value."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(64, 64, 3, padding=1)

        def forward(self, x):
            return write(self.convolution(x))

    torch.manual_seed(0)
    x = torch.randn(2, 64, 5, 5)
    converted, low = lowered(Net(), x, "mxint8")
    assert count(low, conv2d_mx) == (write is first_channels)
    torch.testing.assert_close(low(x), converted(x), **CLOSE)


def test_dropout_in_place_that_does_nothing():
    """As in front of EfficientNet's classifier."""
    model = nn.Sequential(
        nn.Conv2d(32, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Linear(64, 8)
    )
    x = torch.randn(2, 32, 5, 5)
    converted, low = lowered(model.eval(), x)
    assert count(low, conv2d_mx) == 1
    torch.testing.assert_close(low(x), converted(x), **CLOSE)


def test_an_input_that_is_written_after_it_is_quantized():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(64, 64, 3, padding=1)

        def forward(self, x):
            doubled = x * 2
            quantized = ops.fake_quantize_mx(doubled, "int8", 32, 1, "floor", "even", None, "identity")
            doubled.zero_()
            return self.convolution(quantized)

    x = torch.randn(2, 64, 5, 5)
    converted = convert(Net(), (x,), "mxfp4_weight_only")
    low = lower_to_inductor(converted)
    assert count(low, conv2d_mx) == 1
    torch.testing.assert_close(low(x), converted(x), **CLOSE)
