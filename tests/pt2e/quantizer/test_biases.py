import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2mx import MXQuantizationConfig, MXQuantizer, fake_quantize_mx
from tests.quantized_by_hand import A, Call, W, a, w


@pytest.mark.parametrize(
    ("function", "by_hand", "input_shape", "parameter_shapes"),
    [
        (F.conv2d, lambda x, m, b: F.conv2d(a(x, 1), w(m, 1), w(b, 0)), (2, 20, 5, 5), [(40, 20, 3, 3), (40,)]),
        (
            F.conv_transpose1d,
            lambda x, m, b: F.conv_transpose1d(a(x, 1), w(m, 0), w(b, 0)),
            (2, 40, 5),
            [(40, 24, 3), (24,)],
        ),
        (
            lambda x, b, m: torch.addmm(b, x, m),
            lambda x, b, m: torch.addmm(w(b, 1), a(x, 1), w(m, 0)),
            (20, 40),
            [(20, 24), (40, 24)],
        ),
        (
            lambda x, b, m: torch.baddbmm(b, x, m),
            lambda x, b, m: torch.baddbmm(w(b, 2), a(x, 2), w(m, 1)),
            (2, 20, 40),
            [(2, 20, 24), (2, 40, 24)],
        ),
        (
            lambda x, m, b: F.bilinear(x, x, m, b),
            lambda x, m, b: F.bilinear(a(x, 1), a(x, 1), w(m, 2), w(b, 0)),
            (2, 20),
            [(24, 20, 20), (24,)],
        ),
    ],
)
def test_biases(function, by_hand, input_shape, parameter_shapes, quantize):
    model, inputs = Call(function, *parameter_shapes).eval(), (torch.randn(input_shape),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W, bias=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    with torch.no_grad():
        assert torch.equal(converted(*inputs), by_hand(*inputs, *model.p))
        assert torch.equal(converted(*inputs), prepared)
    assert {t.dtype for t in converted.state_dict().values()} == {torch.uint8}


def test_bias_and_output(quantize):
    model, inputs = nn.Linear(40, 24).eval(), (torch.randn(3, 40),)
    config = MXQuantizationConfig(activation=A, weight=W, bias=W, output="mxint8")
    prepared, _, converted = quantize(torch.export.export(model, inputs), MXQuantizer().set_global(config), inputs)
    want = F.linear(a(inputs[0], -1), w(model.weight, -1), w(model.bias, -1))
    assert torch.equal(converted(*inputs), fake_quantize_mx(want, "mxint8")) and torch.equal(
        converted(*inputs), prepared
    )
