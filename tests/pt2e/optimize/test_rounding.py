import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from tests.models import module_of
from tests.optimized_models import W4, correlated, exported, quantized, rows


def test_convolutions_with_their_batch_norms():
    torch.manual_seed(0)
    model = module_of(
        lambda self, x: self.last(torch.relu(self.grouped(torch.relu(self.norm(self.first(x)))))),
        first=nn.Conv2d(3, 16, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(16),
        grouped=nn.Conv2d(16, 32, 3, stride=2, groups=2),
        last=nn.ConvTranspose2d(32, 8, 2),
    )
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    smooth = nn.functional.avg_pool2d(torch.randn(8, 3, 24, 24), 5, 1, 2) * 5
    graph = exported(model, smooth)
    quantizer = MXQuantizer().set_global(W4)
    optimized = pt2mx.optimize(graph, quantizer, [smooth.flip(-1), (smooth,)])
    torch.testing.assert_close(pt2mx.optimize(graph, MXQuantizer().set_global(None), [smooth])(smooth), graph(smooth))
    report = rows(optimized)
    assert [row.algorithm for row in report.values()] == ["gptq"] * 3
    assert all(row.after < 0.6 * row.before for row in report.values())
    assert not any("batch_norm" in node.name for node in optimized.graph.nodes)
    want = graph(smooth)
    error = [(quantized(model, quantizer)(smooth) - want).square().sum() for model in (graph, optimized)]
    assert error[1] < 0.6 * error[0]


def shared(self, x):
    """A linear layer with two inputs, a weight in two formats, a weight with an unquantized user, and a chain of
    constants."""
    y = self.twice(self.twice(x))
    y = self.plain(y) + self.plain.weight.sum()
    return y @ (self.weight * 2)


def test_weights_that_are_shared():
    torch.manual_seed(0)
    x = correlated(32, 64)
    net = module_of(
        shared, twice=nn.Linear(64, 64), plain=nn.Linear(64, 64, bias=False), weight=nn.Parameter(torch.randn(64, 32))
    )
    graph = exported(net, x)
    quantizer = MXQuantizer().set_global(W4)
    optimized = pt2mx.optimize(graph, quantizer, [x])
    report = rows(optimized)
    assert [row.algorithm for row in report.values()] == ["gptq"] * 3
    # other users of a weight keep the float one
    assert torch.equal(optimized.get_parameter("plain.weight"), graph.get_parameter("plain.weight"))
    assert {"plain.weight_rounded", "weight_rounded"} == set(dict(optimized.named_buffers()))
    assert {"plain.weight", "twice.weight", "twice.bias"} == set(dict(optimized.named_parameters()))
    want = graph(x)
    error = [(quantized(model, quantizer)(x) - want).square().sum() for model in (graph, optimized)]
    assert error[1] < error[0]


def test_reasons():
    torch.manual_seed(0)
    x = correlated(16, 64)
    graph = exported(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), x)
    ceil = get_default_mx_quantization_config(weight=pt2mx.MXSpec("mxfp4", scale_mode="ceil"), activation=None)
    optimized = pt2mx.optimize(graph, MXQuantizer().set_global(ceil).set_module_name("0", W4), [x])
    report = rows(optimized)
    assert report["0.weight"].algorithm == "gptq"
    assert report["1.weight"].algorithm == "" and "ceil would quantize" in report["1.weight"].reason
    assert math.isnan(report["1.weight"].before) and "nan" not in pt2mx.optimization_report(optimized).to_table()
    assert torch.equal(optimized.get_parameter("1.weight"), graph.get_parameter("1.weight"))
    bad = pt2mx.optimize(graph, MXQuantizer().set_global(W4), [x, torch.full_like(x, float("inf"))])
    assert all("Inf or a NaN" in row.reason and row.algorithm == "scales" for row in rows(bad).values())
    table = pt2mx.optimization_report(optimized).to_table().splitlines()
    assert table[0].split()[:3] == ["weight", "format", "algorithm"] and len(table) == 3


def layer_of(weight):
    return module_of(lambda self, x: nn.functional.linear(x, self.weight), weight=nn.Parameter(weight))


@pytest.mark.parametrize("factors", [(1e30, 1), (1e-35, 1), (1, 1e17), (1, 1e-20)])
def test_values_whose_squares_leave_the_range(factors):
    weight, x = torch.randn(16, 64) * factors[0], correlated(256, 64) * factors[1]
    optimized = pt2mx.optimize(exported(layer_of(weight), x), MXQuantizer().set_global(W4), [x])
    row = rows(optimized)["weight"]
    assert row.algorithm == "gptq" and 0 < row.after < 0.7 * row.before < 0.05


def test_weights_that_cannot_be_rounded():
    x = correlated(16, 64)
    broken = torch.randn(16, 64)
    broken[3, 5] = float("nan")
    for weight, reason in ((broken, "it holds an Inf or a NaN"), (torch.randn(0, 64), "it is empty")):
        optimized = pt2mx.optimize(exported(layer_of(weight), x), MXQuantizer().set_global(W4), [x])
        assert rows(optimized)["weight"].reason == reason
        assert torch.equal(optimized.get_parameter("weight").nan_to_num(), weight.nan_to_num())  # only the NaN differs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models(dtype):
    torch.manual_seed(0)
    x = correlated(32, 64).to(dtype)
    graph = exported(nn.Linear(64, 64).to(dtype), x)
    optimized = pt2mx.optimize(graph, MXQuantizer().set_global(W4), [x])
    row = rows(optimized)["weight"]
    assert optimized.get_parameter("weight").dtype == dtype and row.algorithm == "gptq" and row.after < 0.5 * row.before


def test_one_weight_in_matmuls_that_reduce_different_dimensions():
    def both(self, x):  # (3, rows, 64): each by one matrix, and the first rows by all
        return x @ self.weight, x[0] @ self.weight

    model, x = module_of(both, weight=nn.Parameter(torch.randn(3, 64, 32))), correlated(3, 32, 64)
    row = rows(pt2mx.optimize(exported(model, x), MXQuantizer().set_global(W4), [x]))["weight"]
    assert row.algorithm != "gptq" and row.reason.startswith("its matmuls reduce other dimensions of it")
