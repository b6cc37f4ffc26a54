import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.algorithms import GPTQ, Rotation, ScaleSearch, Smoothing
from pt2mx.pt2e.optimize.smoothing import keeps_bits
from tests.models import module_of

W4A4 = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation="mxfp4"))
W4A8 = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation="mxfp8"))
W4 = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation=None))


class Net(nn.Module):
    """A norm with large channels before two layers, one with a residual around it."""

    def __init__(self, residual=False):
        super().__init__()
        self.norm, self.residual = nn.LayerNorm(64), residual
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        with torch.no_grad():
            self.norm.weight[::16] = 40.0

    def forward(self, x):
        y = self.norm(x)
        z = self.first(y) * self.second(y)
        return self.last(torch.relu(z + y if self.residual else z))


def setting(residual=False, dtype=torch.float32):
    torch.manual_seed(0)
    model, x = Net(residual).eval().to(dtype), torch.randn(128, 64, dtype=dtype)
    return model, torch.export.export(model, (x,)).module(), x


def rows(model):
    return {row.weight: row for row in pt2mx.optimization_report(model).weights}


def error(graph, quantizer, x, want):
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, quantizer))
    return float((converted(x) - want).detach().double().square().sum())


def test_large_channels_go_into_the_weights():
    model, graph, x = setting()
    optimized = pt2mx.optimize(graph, W4A4, [x], algorithms=(Smoothing(), ScaleSearch()))
    report = rows(optimized)
    assert report["first.weight"].smoothed == report["second.weight"].smoothed == "norm.weight, norm.bias"
    assert report["last.weight"].smoothed == "first.weight, first.bias"  # one factor of a matmul
    assert error(optimized, W4A4, x, model(x)) < 0.8 * error(graph, W4A4, x, model(x))
    ratio = optimized.get_parameter("norm.weight") / graph.get_parameter("norm.weight")
    assert torch.equal(ratio, torch.exp2(ratio.log2().round())) and ratio[::16].max() < ratio[1::16].min()
    assert torch.equal(model.norm.weight, graph.get_parameter("norm.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_float_model_stays_to_the_bit(dtype):
    """The model has exact matmuls."""
    _, graph, x = setting(residual=True, dtype=dtype)
    for parameter in graph.parameters():
        parameter.data = parameter.data.mul(8).round() / 8
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight=None, activation="mxfp4"))
    same = pt2mx.optimize(graph, quantizer, [x], algorithms=Smoothing())
    assert torch.equal(same(x), graph(x))  # no weight is quantized: nothing to smooth
    optimized = pt2mx.optimize(graph, W4A4, [x], algorithms=Smoothing())
    assert {row.smoothed for row in rows(optimized).values()} == {"div"}
    assert [n.target for n in optimized.graph.nodes].count(torch.ops.aten.div.Tensor) == 2
    torch.testing.assert_close(optimized(x), graph(x), rtol=0 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.diagonal
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scale", "smoothed"),
    [
        (torch.float16, 1.0, True),
        (torch.float16, 1e-4, False),  # smaller values would lose bits
        (torch.bfloat16, 1e-4, True),
        (torch.float32, 1e-30, True),
        (torch.float32, 1e-36, False),
    ],
)
def test_the_float_model_stays_also_where_numbers_are_small(dtype, scale, smoothed, residual):
    _, graph, x = setting(residual, dtype)
    graph.get_parameter("norm.weight").data.mul_(scale)
    optimized = pt2mx.optimize(graph, W4A4, [x], algorithms=Smoothing())
    assert bool(rows(optimized)["first.weight"].smoothed) == smoothed
    want = graph(x).double()
    assert (optimized(x).double() - want).square().sum() <= 1e-11 * want.square().sum()


def test_weights_and_inputs_that_would_overflow_stay():
    largest = torch.tensor([1.0, 3e38, 1e37, 3.0, 0.0])
    exponents = torch.tensor([10.0, 1.0, 1.0, -4.0, -4.0])
    assert keeps_bits(largest, exponents, torch.float32).tolist() == [True, False, True, True, True]
    assert keeps_bits(largest, -exponents, torch.float32).tolist() == [True, True, True, True, True]
    assert keeps_bits(largest, exponents, torch.float16).tolist() == [True, False, False, True, True]
    small = torch.tensor([0.99, 1.0, 4000.0, 4000.0])
    assert keeps_bits(small, torch.tensor([-4.0, -4.0, 0.0, 1.0]), torch.float16).tolist() == [False, True, True, False]
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 8).eval(), torch.randn(16, 64) * 1e-5
    layer.weight.data.mul_(8).mul_(2e38)
    x[:, ::16] *= 1000
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation=None))
    graph = torch.export.export(layer, (x,)).module()
    for algorithms in (
        Smoothing(weight_only=True),
        Rotation(),
        (Smoothing(weight_only=True), Rotation(), ScaleSearch()),
    ):
        optimized = pt2mx.optimize(graph, quantizer, [x], algorithms=algorithms)
        assert all(parameter.isfinite().all() for parameter in optimized.parameters())
        assert pt2mx.convert_pt2e(pt2mx.prepare_pt2e(optimized, quantizer))(x).isfinite().all()


def test_weights_that_are_not_smoothed():
    _, graph, x = setting()
    for quantizer in (W4, W4A8):  # 8 bits represent large channels well
        optimized = pt2mx.optimize(graph, quantizer, [x], algorithms=Smoothing())
        assert not any(row.smoothed for row in rows(optimized).values())
        assert optimized.code == graph.code
    optimized = pt2mx.optimize(graph, W4, [x], algorithms=Smoothing(weight_only=True))
    assert all(row.smoothed for row in rows(optimized).values())


def test_gptq_sees_the_smoothed_and_rotated_inputs():
    model, graph, x = setting(residual=True)
    optimized = pt2mx.optimize(graph, W4A4, [x], algorithms=(Smoothing(), Rotation(), GPTQ()))
    for row in rows(optimized).values():
        assert (row.algorithm, row.rotated, row.smoothed) == ("gptq", 32, "div") and row.after < 0.5 * row.before
    prepared = pt2mx.prepare_pt2e(optimized, W4A4)
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    assert torch.equal(converted(x), prepared(x))
    alone = pt2mx.optimize(graph, W4A4, [x], algorithms=(Rotation(), GPTQ()))
    assert error(optimized, W4A4, x, model(x)) < error(alone, W4A4, x, model(x))


def test_tied_and_dead_channels():
    torch.manual_seed(0)
    model, x = module_of(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(64, 64)).eval(), torch.randn(32, 64)
    graph = torch.export.export(model, (x,)).module()
    optimized = pt2mx.optimize(graph, W4A4, [x], algorithms=Smoothing())
    assert rows(optimized)["layer.weight"].smoothed == ""  # one weight of two inputs
    x[:, 5], linear = 0, nn.Linear(64, 16).eval()
    linear.weight.data[:, 7] = 0
    x[:, 9] *= 100
    optimized = pt2mx.optimize(torch.export.export(linear, (x,)).module(), W4A4, [x], algorithms=Smoothing())
    assert rows(optimized)["weight"].smoothed == "div" and optimized(x).isfinite().all()
    (factor,) = optimized.buffers()
    assert factor[5] == factor[7] == 1 and factor[9] >= 4


def test_the_factors_are_not_quantized():
    _, graph, x = setting(residual=True)
    w4a4 = get_default_mx_quantization_config(weight="mxfp4", activation="mxfp4")
    quantizer = MXQuantizer().set_global(w4a4).set_operator_type("aten.mul", w4a4)
    optimized = pt2mx.optimize(graph, quantizer, [x], algorithms=Smoothing())
    assert error(optimized, quantizer, x, graph(x)) < error(graph, quantizer, x, graph(x))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_features():
    model, x = nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 4)).eval(), torch.randn(2, 64)
    graph = torch.export.export(model, (x,)).module()
    optimized = pt2mx.optimize(graph, W4A4, [x], preset="best")
    assert {row.reason for row in rows(optimized).values()} == {"it is empty"}
    assert torch.equal(optimized(x), graph(x))
